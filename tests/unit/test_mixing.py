"""Mixup and CutMix, with the drawn numbers worked out by the reference in plain Python (tests/splitmix.py)."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.augment_section import AugmentConfig
from tests import splitmix
from trainer.data.mixing import Mixing, beta_quantiles, partners_of
from trainer.data.order import Order

CPU = torch.device("cpu")
MIX = 6


def images(count: int, side: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    """Image i is i all over, so that what comes from where can be read off."""
    return torch.arange(count, dtype=dtype).view(-1, 1, 1, 1).expand(count, 3, side, side).clone()


def mixing(seed: int = 3, classes: int = 10, **augment: Any) -> Mixing:
    return Mixing(AugmentConfig(**augment), seed, classes, CPU)


def mixed(count: int, epoch: int = 0, side: int = 8, first: int = 40, **more: Any) -> tuple[Tensor, Tensor]:
    """`count` images of as many classes, whose draws are `first` and those after it."""
    draws = torch.arange(first, first + count)
    return mixing(classes=count, **more)(images(count, side), torch.arange(count), epoch, draws)


def test_neighbours_are_partners() -> None:
    assert partners_of(5, CPU).tolist() == [1, 0, 3, 2, 4]
    assert partners_of(1, CPU).tolist() == [0]


@pytest.mark.parametrize("repeats", [2, 3, 4])
@pytest.mark.parametrize("batch", [7, 8, 12])
def test_no_image_is_mixed_with_its_own_copy(repeats: int, batch: int) -> None:
    """Nor is a draw there twice, by which pairs are told apart."""
    order = Order(50, 3, batch, False, 0, 1, batch, CPU, unit=2, repeats=repeats)
    batches, seen = order.batches(0, 0), []
    for _ in range(order.batches_per_epoch):
        draws = next(batches).draws[0]
        partners = partners_of(len(draws), CPU)
        alone = partners == torch.arange(len(draws))
        assert ((draws[partners] % 50 != draws % 50) | alone).all()
        seen += draws.tolist()
    assert len(set(seen)) == 50


@pytest.mark.parametrize("augment", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_classes_add_up_to_one_exactly_and_have_their_images_shares(augment: dict[str, float], count: int) -> None:
    for dtype in (torch.float32, torch.float64):
        pixels, targets = mixing(classes=count, **augment)(
            images(count, 9, dtype), torch.arange(count), 2, torch.arange(count)
        )
        assert (targets.sum(1) == 1).all()
        assert pixels.dtype == targets.dtype == dtype
        for i in range(count):
            partner = min(i ^ 1, count - 1)
            expected = float(targets[i, i]) * i + float(targets[i, partner]) * partner * (partner != i)
            assert float(pixels[i].double().mean()) == pytest.approx(expected, abs=1e-5)
            assert set(targets[i].nonzero().flatten().tolist()) <= {i, partner}
    if count % 2:
        assert torch.equal(pixels[-1], images(count, 9, dtype)[-1])
        assert targets[-1, -1] == 1


def test_a_pair_of_one_class_stays_of_that_class() -> None:
    _, targets = mixing(classes=3, mixup=0.3)(images(6), torch.tensor([1, 1, 2, 2, 0, 0]), 0, torch.arange(6))
    assert torch.equal(targets, torch.eye(3)[[1, 1, 2, 2, 0, 0]])


@pytest.mark.parametrize("seed", range(5))
def test_cutmix_counts_the_pixels_exactly(seed: int) -> None:
    """A power of two, of which every share is exact."""
    pixels, targets = mixed(40, side=16, seed=seed, cutmix=1.0)
    for i in range(40):
        assert float(targets[i, i]) == float((pixels[i, 0] == i).sum()) / 256
        assert float(targets[i, i ^ 1]) == float((pixels[i, 0] == i ^ 1).sum()) / 256


def test_the_box_is_that_of_the_paper() -> None:
    """By hand: the centre anywhere, sides of the square root of the share, cut off at the border."""
    pixels, _ = mixed(60, epoch=1, side=20, cutmix=1.0)
    for i in range(60):
        pair = 40 + i - i % 2
        share = (drawn(3, 1, 3, pair, 2**16) + 0.5) / 2**16  # Beta(1, 1) is uniform
        y, x = drawn(3, 1, 4, pair, 20), drawn(3, 1, 5, pair, 20)
        half = int(20 * math.sqrt(round(share * 2**24) / 2**24)) // 2
        expected = [(r, c) for r in range(20) for c in range(20) if -half <= r - y < half and -half <= c - x < half]
        assert [tuple(place) for place in (pixels[i, 0] == i ^ 1).nonzero().tolist()] == expected


def drawn(seed: int, epoch: int, kind: int, index: int, bound: int) -> int:
    return (splitmix.first_outputs(splitmix.key(seed, epoch, MIX, kind), index + 1)[index] >> 33) % bound


def test_both_of_a_pair_have_one_share_and_pairs_differ() -> None:
    _, targets = mixed(40, mixup=1.0)
    shares = targets.diagonal().tolist()
    assert shares[::2] == shares[1::2]
    assert len(set(shares)) == 20
    uniform = [(drawn(3, 0, 2, 40 + i, 2**16) + 0.5) / 2**16 for i in range(0, 40, 2)]
    assert [1 - share for share in shares[::2]] == pytest.approx(uniform, abs=1e-7)


def test_what_is_drawn_goes_by_seed_epoch_and_pair() -> None:
    keys: list[dict[str, int]] = [{}, {"seed": 4}, {"epoch": 1}, {"first": 42}]
    shares = [float(mixed(2, mixup=1.0, **key)[1][0, 0]) for key in keys]
    assert len(set(shares)) == 4
    assert shares[2] == float(mixed(2, mixup=1.0, epoch=1)[1][0, 0])


@pytest.mark.parametrize("augment", [{"mixup": 0.2, "cutmix": 1.0}, {"cutmix": 0.5}], ids=str)
def test_a_part_of_a_batch_is_mixed_as_the_whole(augment: dict[str, Any]) -> None:
    whole, all_targets = mixed(16, **augment)
    for start, stop in ((0, 2), (2, 6), (6, 16)):
        part = slice(start, stop)
        pixels, targets = mixing(classes=16, **augment)(
            images(16)[part], torch.arange(16)[part], 0, torch.arange(40, 56)[part]
        )
        assert torch.equal(pixels, whole[part])
        assert torch.equal(targets, all_targets[part])


def test_either_of_both_and_neither() -> None:
    pixels, _ = mixed(2000, side=16, mixup=0.5, cutmix=1.0, mix_probability=0.5, mix_switch=0.25)
    kinds = {"none": 0, "cutmix": 0, "mixup": 0}
    for i in range(0, 2000, 2):
        values = set(pixels[i].unique().tolist())
        kinds["none" if values == {i} else "cutmix" if values <= {i, i + 1} else "mixup"] += 1
    # Of 1,000 pairs 500, 125 and 375, and some 25 where a box is empty or a share 0. Five deviations are 79, 52, 77.
    assert abs(kinds["none"] - 520) < 90
    assert abs(kinds["cutmix"] - 115) < 60
    assert abs(kinds["mixup"] - 370) < 80


def test_quantiles_of_beta_are_those_of_its_closed_forms() -> None:
    places = (torch.arange(2**12, dtype=torch.float64) + 0.5) / 2**12
    for alpha, quantile in ((1.0, places), (0.5, (math.pi / 2 * places).sin() ** 2)):
        assert (beta_quantiles(alpha, 2**12) - quantile).abs().max() < 1e-7
    found = beta_quantiles(2.0, 2**12)
    assert (3 * found**2 - 2 * found**3 - places).abs().max() < 1e-7


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.2, 0.8, 1.0, 3.0, 50.0])
def test_quantiles_of_beta_have_its_moments(alpha: float) -> None:
    found = beta_quantiles(alpha, 2**16)
    assert float(found.mean()) == pytest.approx(0.5, abs=1e-12)
    assert float(found.var(correction=0)) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=1e-3)
    assert ((found * 2**24) == (found * 2**24).round()).all()
    assert (found.diff() >= 0).all()


@pytest.mark.parametrize(
    ("augment", "said"),
    [
        ({"mix_probability": 0.5}, "mix_probability needs mixup or cutmix"),
        ({"mixup": 0.2, "mix_switch": 0.1}, "mix_switch needs mixup and cutmix"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(augment: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AugmentConfig(**augment)  # type: ignore[arg-type]
