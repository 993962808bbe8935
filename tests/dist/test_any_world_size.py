"""The same run on one process and on several: samples, losses, weights. By DDP, within what its sums allow; by virtual
shards to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import RunConfig
from tests import splitmix
from tests.dist.harness import Attempt, finished, tiny_config
from trainer.models import build_model

# 64 images: seven batches of 9 and one of 1, in which all ranks but one are without a sample.
RAGGED: dict[str, Any] = {
    "dtype": "float64",
    "global_batch_size": 9,
    "max_epochs": None,
    "max_steps": 200,
    "log__every_steps": 50,
    "eval__every_epochs": None,
    "checkpoint__every_epochs": None,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
    "adamw": {"name": "adamw", "lr": 0.01, "weight_decay": 1e-2},
}


def long_run(path: Path, optimizer: str, world_size: int, cap: int | None) -> Attempt:
    config = tiny_config(**RAGGED, optim=OPTIMIZERS[optimizer], max_per_device_batch_size=cap)
    return finished(path, config, world_size)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Attempt]:
    """By optimizer: 200 steps of one process, each batch in one piece."""
    return {name: long_run(tmp_path_factory.mktemp("alone") / "run", name, 1, None) for name in OPTIMIZERS}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize(
    ("optimizer", "world_size", "cap"),
    [
        ("sgd", 1, 5), ("sgd", 2, None), ("sgd", 3, 2), ("sgd", 4, None),
        ("adamw", 1, 5), ("adamw", 2, 3), ("adamw", 3, None), ("adamw", 4, 2),
    ],
)  # fmt: skip
def test_200_steps_in_float64(
    tmp_path: Path, alone: dict[str, Attempt], optimizer: str, world_size: int, cap: int | None
) -> None:
    found = long_run(tmp_path / "run", optimizer, world_size, cap)
    assert distance(found.weights(), alone[optimizer].weights()) <= 1e-10
    assert [step for step, _ in found.metric("train/loss")] == [50, 100, 150, 200]
    for (_, ours), (_, theirs) in zip(found.metric("train/loss"), alone[optimizer].metric("train/loss"), strict=True):
        assert abs(ours - theirs) <= 1e-10
    assert found.checkpoint().state["train_state"]["samples_seen"] == 25 * 64


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_200_steps_in_fp32_with_virtual_shards(tmp_path: Path, optimizer: str) -> None:
    """Where DDP's runs have long drifted apart. Three of the four shards of the last batch are empty."""
    changes: dict[str, Any] = {"dtype": "float32", "virtual_shards": 4, "optim": OPTIMIZERS[optimizer]}
    config = tiny_config(**RAGGED | changes, max_per_device_batch_size=2)
    alone, *others = (finished(tmp_path / str(world_size), config, world_size) for world_size in (1, 2, 4))
    for found in others:
        assert distance(found.weights(), alone.weights()) == 0
        assert found.lines() == alone.lines()


@pytest.mark.parametrize(("global_batch", "world_size", "uneven"), [(8, 2, False), (9, 2, True), (8, 3, True)])
def test_first_steps_in_fp32(tmp_path: Path, global_batch: int, world_size: int, uneven: bool) -> None:
    config = tiny_config(global_batch_size=global_batch, max_epochs=None, max_steps=10)
    alone = finished(tmp_path / "alone", config)
    together = finished(tmp_path / "together", config, world_size)
    assert distance(alone.weights(), together.weights()) <= 1e-5
    for (step, ours), (other_step, theirs) in zip(
        together.metric("train/loss"), alone.metric("train/loss"), strict=True
    ):
        assert step == other_step
        assert abs(ours - theirs) <= 1e-5
    assert together.log().count("uneven") == uneven
    assert "of 8\n" in together.log()  # steps in an epoch
    assert "uneven" not in alone.log() + together.log(1)


def ids_read(reads: Path, world_size: int, sizes: list[int]) -> list[list[int]]:
    """The samples of each global batch, put together from what each rank read.
    The first read of a rank is build's, which looks at the shape of an image."""
    ranks = [[int(line) for line in Path(f"{reads}.{rank}").read_text().split()] for rank in range(world_size)]
    assert all(ids.pop(0) == 0 for ids in ranks)
    batches = []
    for n in sizes:
        batch = []
        for rank, ids in enumerate(ranks):
            share = (rank + 1) * n // world_size - rank * n // world_size
            batch += ids[:share]
            del ids[:share]
        batches.append(batch)
    assert ranks == [[]] * world_size
    return batches


@pytest.mark.parametrize(("world_size", "cap"), [(1, None), (2, None), (3, None), (3, 1)])
def test_samples_are_those_of_the_reference(tmp_path: Path, world_size: int, cap: int | None) -> None:
    changes = {"data__residency": "stream", "data__num_workers": 0, "seed": 11, "max_per_device_batch_size": cap}
    environment = {"READS": str(tmp_path / "reads"), "TRAIN_SIZE": "21"}
    finished(tmp_path / "run", tiny_config(**changes), world_size, environment)
    expected = []
    for epoch in range(2):
        order = splitmix.permutation(21, 11, epoch)
        expected += [order[0:8], order[8:16], order[16:21]]
    assert ids_read(tmp_path / "reads", world_size, [8, 8, 5] * 2) == expected


def test_streamed_and_resident_data_train_the_same_weights(tmp_path: Path) -> None:
    augment = {"shift": 1, "flip": True, "cutout": 2}
    runs = [
        finished(
            tmp_path / residency, tiny_config(data__augment=augment, data__residency=residency, data__num_workers=1)
        )
        for residency in ("device", "stream")
    ]
    assert distance(runs[0].export(), runs[1].export()) == 0
    assert runs[0].lines() == runs[1].lines()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_first_weights_are_those_of_the_seed(tmp_path: Path, world_size: int) -> None:
    config: RunConfig = tiny_config(seed=5, max_epochs=None, max_steps=1, optim={"name": "sgd", "lr": 0.0})
    found = finished(tmp_path, config, world_size).weights()
    expected = build_model(config.model, 4, (1, 8, 8), 5, torch.float32).state_dict()
    assert distance(found, expected) == 0


@pytest.mark.parametrize("augment", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}], ids=str)
def test_pairs_are_mixed_alike_on_any_number_of_processes(tmp_path: Path, augment: dict[str, float]) -> None:
    settings = {"data__augment": augment, "global_batch_size": 7, "loss__name": "bce", "dtype": "float64"}
    alone = finished(tmp_path / "1", tiny_config(**settings), 1)
    for world_size in (2, 3):
        other = finished(tmp_path / str(world_size), tiny_config(**settings, max_per_device_batch_size=3), world_size)
        for name, tensor in alone.weights().items():
            torch.testing.assert_close(other.weights()[name], tensor, rtol=1e-12, atol=1e-12)
