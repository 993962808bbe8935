import random

import pytest
import torch

from configs.data_section import AugmentConfig
from trainer.data.mixing import Mixing, cutmix, partners_of

CPU = torch.device("cpu")


def images(count: int, side: int = 8) -> torch.Tensor:
    """Image i is i all over, so that what comes from where can be read off."""
    return torch.arange(count, dtype=torch.float64).view(-1, 1, 1, 1).expand(count, 1, side, side).clone()


def test_neighbours_are_partners() -> None:
    assert partners_of(5, CPU).tolist() == [1, 0, 3, 2, 4]
    assert partners_of(1, CPU).tolist() == [0]


@pytest.mark.parametrize("count", [1, 4, 5])
def test_mixup_mixes_images_and_classes_alike(count: int) -> None:
    labels = torch.arange(count)
    mixed, targets = Mixing(AugmentConfig(mixup=0.8), 3, 6)(images(count), labels, 0, 7)
    own = targets[torch.arange(count), labels]
    for i in range(count):
        partner = min(i ^ 1, count - 1)
        weight = float(targets[0, 0]) if count > 1 else 1.0
        assert float(mixed[i].mean()) == pytest.approx(weight * i + (1 - weight) * partner)
        assert float(own[i]) == pytest.approx(1.0 if partner == i else weight)
    assert targets.sum(1).tolist() == pytest.approx([1.0] * count)


def test_what_is_drawn_goes_by_seed_epoch_and_batch() -> None:
    def drawn(seed: int, epoch: int, batch: int) -> float:
        _, targets = Mixing(AugmentConfig(mixup=1.0), seed, 2)(images(2), torch.tensor([0, 1]), epoch, batch)
        return float(targets[0, 0])

    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert len({drawn(*key) for key in keys}) == 4
    assert drawn(*keys[2]) == drawn(*keys[2])


@pytest.mark.parametrize("seed", range(20))
def test_cutmix_counts_the_pixels(seed: int) -> None:
    labels = torch.arange(4)
    mixed, targets = Mixing(AugmentConfig(cutmix=1.0), seed, 4)(images(4, 9), labels, 0, 0)
    for i in range(4):
        own = float((mixed[i] == i).double().mean())
        assert float(targets[i, i]) == pytest.approx(own)
        assert float(targets[i, i ^ 1]) == pytest.approx(1 - own)
        assert set(mixed[i].unique().tolist()) <= {float(i), float(i ^ 1)}


def test_the_box_has_the_wanted_area_where_it_fits() -> None:
    draws = random.Random(0)
    shares = [cutmix(images(2, 100), partners_of(2, CPU), 0.75, draws)[1] for _ in range(200)]
    assert min(shares) == pytest.approx(0.75)  # half the height and half the width, if nothing sticks out
    assert max(shares) < 1


def test_either_of_both_and_neither() -> None:
    both = AugmentConfig(mixup=0.2, cutmix=1.0, mix_probability=0.5, mix_switch=0.5)
    kinds = {"none": 0, "cutmix": 0, "mixup": 0}
    for batch in range(400):
        mixed, _ = Mixing(both, 0, 2)(images(2, 16), torch.tensor([0, 1]), 0, batch)
        values = set(mixed.unique().tolist())
        kinds["none" if torch.equal(mixed, images(2, 16)) else "cutmix" if values == {0.0, 1.0} else "mixup"] += 1
    # A fair coin and another: 200, 100, 100; a box can be empty. Five standard deviations are 50 and 43.
    assert abs(kinds["none"] - 200) < 60
    assert abs(kinds["mixup"] - 100) < 45
