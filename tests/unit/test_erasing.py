"""Random erasing, held to the reference in plain Python, which is written after timm's."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.augment_section import AugmentConfig
from tests import splitmix
from trainer.data.augment import Preprocess

CPU = torch.device("cpu")
ERASING = 9


def preprocess(**augment: Any) -> Preprocess:
    return Preprocess(AugmentConfig(**augment), 5, (0.5,), (0.25,), torch.float32, CPU)


def erased(count: int, height: int, width: int, **augment: Any) -> Tensor:
    white = torch.full((count, 1, height, width), 255, dtype=torch.uint8)
    return preprocess(**augment).for_training(white, 1, torch.arange(count))


def box_by_hand(index: int, height: int, width: int, probability: float) -> tuple[int, int, int, int] | None:
    """Top, left, height, width."""
    numbers = splitmix.first_outputs(splitmix.key(5, 1, ERASING), 32 * (index + 1))[32 * index :]
    draws = [(number >> 33) % 2**24 for number in numbers]
    if draws[0] >= probability * 2**24:
        return None
    for attempt in range(10):
        area = (0.02 + draws[3 + attempt] / 2**24 * (1 / 3 - 0.02)) * height * width
        ratio = math.exp(math.log(0.3) * (1 - 2 * (draws[13 + attempt] % 1024) / 1023))
        tall, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if tall < height and wide < width:
            return draws[1] * (height - tall + 1) >> 24, draws[2] * (width - wide + 1) >> 24, tall, wide
    return None


@pytest.mark.parametrize(("height", "width"), [(32, 32), (10, 61)])
def test_the_box_is_the_references(height: int, width: int) -> None:
    found, boxes = erased(300, height, width, erasing=0.5), 0
    for index in range(300):
        expected = torch.full((height, width), 2.0)
        if (box := box_by_hand(index, height, width, 0.5)) is not None:
            top, left, tall, wide = box
            expected[top : top + tall, left : left + wide] = 0
            boxes += 1
        assert torch.equal(found[index, 0], expected)
    assert 90 < boxes < 190


def test_the_share_that_is_erased_is_that_of_the_published_ranges() -> None:
    """Uniform between 0.02 and 1/3, of which a square image refuses next to nothing."""
    shares = erased(4000, 64, 64, erasing=1.0).eq(0).float().mean((1, 2, 3))
    assert float(shares.mean()) == pytest.approx((0.02 + 1 / 3) / 2, abs=0.01)
    assert float(shares.min()) > 0.01
    assert float(shares.max()) < 0.36


def test_noise_fills_the_same_boxes_and_is_normal() -> None:
    mean, noise = erased(400, 32, 32, erasing=1.0), erased(400, 32, 32, erasing=1.0, erasing_mode="noise")
    inside = mean == 0
    assert torch.equal(noise[~inside], mean[~inside])
    values = noise[inside]
    assert len(values) > 50_000
    assert abs(float(values.mean())) < 0.025  # five standard deviations
    assert float(values.std()) == pytest.approx(1, abs=0.02)
    assert float((values.abs() < 1).float().mean()) == pytest.approx(0.6827, abs=0.012)


@pytest.mark.parametrize("mode", ["mean", "noise"])
def test_a_sample_looks_the_same_in_any_batch(mode: str) -> None:
    images = torch.randint(0, 256, (24, 3, 9, 11), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    change = preprocess(erasing=0.7, erasing_mode=mode)
    whole = change.for_training(images, 3, torch.arange(24))
    for part in torch.randperm(24, generator=torch.Generator().manual_seed(1)).split([1, 3, 20]):
        assert torch.equal(change.for_training(images[part], 3, part), whole[part])


def test_large_images_that_a_cpu_takes_one_by_one_are_erased_too() -> None:
    found = erased(3, 300, 300, erasing=1.0)
    for index in range(3):
        box = box_by_hand(index, 300, 300, 1.0)
        assert box is not None
        assert int(found[index].eq(0).sum()) == box[2] * box[3]


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1)], ids=str)
def test_images_too_narrow_for_any_box_stay(size: tuple[int, int]) -> None:
    """A box is smaller than the image in both directions, and so has no pixel here."""
    assert (erased(50, *size, erasing=1.0) == 2).all()
