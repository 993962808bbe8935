from typing import Any

import pytest
import torch
import torchvision.transforms.v2  # noqa: F401  # imported late by the worker: here before a test looks at the environment

from configs.data_section import AugmentConfig, DataConfig
from trainer.data.policies import Policy

IMAGE = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SETTINGS: list[dict[str, Any]] = [
    {"policy": "autoaugment"},
    {"policy": "randaugment", "policy_ops": 3, "policy_magnitude": 15},
    {"policy": "trivialaugment"},
    {"policy": "augmix"},
    {"color_jitter": (0.4, 0.4, 0.4, 0.1)},
    {"erasing": 1.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_key_alone_decides_and_nobody_else_notices(settings: dict[str, Any], channels: int) -> None:
    policy = Policy(AugmentConfig(**settings), None)
    before = torch.random.get_rng_state()
    image = IMAGE[:channels]
    seen = [policy(image, key) for key in range(8)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(each.shape == image.shape and each.dtype == torch.uint8 for each in seen)
    assert len({each.numpy().tobytes() for each in seen}) > 3
    torch.manual_seed(99)
    assert all(torch.equal(Policy(AugmentConfig(**settings), None)(image, key), seen[key]) for key in range(8))


def test_what_is_erased_is_the_mean() -> None:
    seen = Policy(AugmentConfig(erasing=1.0), (0.2, 0.4, 0.6))(torch.zeros(3, 32, 32, dtype=torch.uint8), 1)
    changed = seen[:, (seen != 0).any(0)]
    assert changed.shape[1] > 0
    assert changed.unique(dim=1).flatten().tolist() == [51, 102, 153]


def test_single_images_cannot_be_changed_on_the_device() -> None:
    with pytest.raises(ValueError, match="residency: device has no workers for augment"):
        DataConfig(residency="device", augment=AugmentConfig(policy="augmix"))


def test_a_hue_of_more_than_all_of_them() -> None:
    with pytest.raises(ValueError, match=r"a hue of 0.6 is more than 0.5"):
        AugmentConfig(color_jitter=(0.4, 0.4, 0.4, 0.6))
