"""Draws worked out with Python's own integers and fractions."""

import bisect
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.data_section import DataConfig
from configs.errors import ConfigError
from tests import splitmix
from trainer.data.datasets import TensorSplit
from trainer.data.order import Order
from trainer.data.sampling import draw, sampling_weights

LABELS = [0] * 6 + [1] * 3 + [2]
SPLIT = TensorSplit(torch.zeros(10, 1, 2, 2, dtype=torch.uint8), torch.tensor(LABELS))


def weights(**settings: Any) -> torch.Tensor | None:
    return sampling_weights(DataConfig(**settings), SPLIT, 3)


def test_what_is_drawn() -> None:
    given = [0.5, 0.0, 2.0, 1.25, 0.0]
    limits = list(itertools.accumulate(given))
    shares = [(value >> 11) / 2**53 for value in splitmix.first_outputs(splitmix.key(7, 3, 8), 5)]
    expected = [bisect.bisect_right(limits, share * limits[-1]) for share in shares]
    assert draw(torch.tensor(given, dtype=torch.float64), 7, 3).tolist() == expected


def test_classes_come_equally_often_when_they_are_balanced() -> None:
    found = weights(sampling="balanced")
    assert found is not None
    assert found.tolist() == pytest.approx([1 / 6] * 6 + [1 / 3] * 3 + [1.0])
    counts = Counter(LABELS[i] for epoch in range(600) for i in draw(found, 0, epoch).tolist())
    # 6000 draws with a chance of a third: a standard deviation of 37.
    assert all(abs(count - 2000) < 180 for count in counts.values())


def test_weights_by_class_and_by_sample(tmp_path: Path) -> None:
    by_class = weights(sampling="weighted", sampling_weights=[0.0, 1.0, 4.0])
    assert by_class is not None
    assert by_class.tolist() == [0.0] * 6 + [1.0] * 3 + [4.0]
    (tmp_path / "weights.txt").write_text("\n".join(map(str, range(10))))
    by_sample = weights(sampling="weighted", sampling_weights=str(tmp_path / "weights.txt"))
    assert by_sample is not None
    assert by_sample.tolist() == list(range(10))
    drawn = {i for epoch in range(300) for i in draw(by_sample, 0, epoch).tolist()}
    assert drawn == set(range(1, 10))


def test_the_last_sample_is_the_last_with_a_weight() -> None:
    only = torch.tensor([0.0, 0.1, 0.0], dtype=torch.float64)
    assert {i for epoch in range(500) for i in draw(only, 0, epoch).tolist()} == {1}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1.0, 2.0], "has 2 numbers for 3 classes"),
        ([0.0, 0.0, 0.0], "not all 0"),
        ("nowhere.txt", "nowhere.txt: .*; give a text file with a number a line"),
    ],
)
def test_weights_that_do_not_fit(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        weights(sampling="weighted", sampling_weights=given)


@pytest.mark.parametrize("content", ["1\n2", "1 2 3 4 5 6 7 8 9 x", "-1" + " 1" * 9, "nan" + " 1" * 9])
def test_files_that_do_not_fit(tmp_path: Path, content: str) -> None:
    (tmp_path / "w.txt").write_text(content)
    with pytest.raises(ConfigError, match=r"w\.txt"):
        weights(sampling="weighted", sampling_weights=str(tmp_path / "w.txt"))


def test_a_data_set_that_does_not_tell_its_classes() -> None:
    class Silent:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any: ...

    with pytest.raises(ConfigError, match="has no `targets`; use weighted, with a file"):
        sampling_weights(DataConfig(name="mine:data", sampling="balanced"), Silent(), 3)


def batches(world_size: int, **settings: Any) -> list[tuple[list[int], list[int]]]:
    """Of two epochs of ten samples in batches of four: (indices, draws) of each."""
    found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for rank in range(world_size):
        order = Order(10, 3, 4, False, rank, world_size, 2, torch.device("cpu"), **settings)
        for batch in itertools.islice(order.batches(0, 0), 6):
            indices, draws = found.setdefault((batch.epoch, batch.index), ([], []))
            if not batch.is_dummy:
                indices += torch.cat(batch.pieces).tolist()
                draws += torch.cat(batch.draws).tolist()
    return list(found.values())


def test_repeats_are_neighbours_with_randomness_of_their_own() -> None:
    expected = splitmix.permutation(10, 3, 0)
    for world_size in (1, 2, 3):
        (first, second, third, *_) = batches(world_size, repeats=3)
        a, b, c, d = expected[:4]
        assert [first[0], second[0], third[0]] == [[a, a, a, b], [b, b, c, c], [c, d]]
        assert [first[1], second[1], third[1]] == [[a, a + 10, a + 20, b], [b + 10, b + 20, c, c + 10], [c + 20, d]]


def test_no_image_is_mixed_with_its_own_copy() -> None:
    a, b, c, d = splitmix.permutation(10, 3, 0)[:4]
    for world_size in (1, 2, 3):
        (first, second, third, *_) = batches(world_size, repeats=3, unit=2)
        assert [first[1], second[1], third[1]] == [
            [a, b, a + 10, b + 10],
            [a + 20, b + 20, c, d],
            [c + 10, d + 10],
        ]


def test_draws_of_one_sample_are_told_apart() -> None:
    heavy = torch.tensor([5.0] + [1.0] * 9, dtype=torch.float64)
    alone = batches(1, draw=lambda epoch: draw(heavy, 3, epoch))
    for world_size in (2, 3):
        assert batches(world_size, draw=lambda epoch: draw(heavy, 3, epoch)) == alone
    for epoch in (alone[:3], alone[3:]):
        indices = [i for batch, _ in epoch for i in batch]
        draws = [i for _, batch in epoch for i in batch]
        assert indices == [i % 10 for i in draws]
        assert len(set(draws)) == 10


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling": "weighted"},
        {"sampling_weights": [1.0]},
        {"sampling": "balanced", "augment": {"repeats": 2}},
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sampling"):
        DataConfig.model_validate(settings)
