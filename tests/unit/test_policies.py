import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from configs.augment_section import AugmentConfig
from configs.data_section import DataConfig
from configs.errors import ConfigError
from trainer.data.policies import Policy

IMAGE = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SETTINGS: list[dict[str, Any]] = [
    {"policy": "autoaugment"},
    {"policy": "randaugment", "policy_ops": 3, "policy_magnitude": 15},
    {"policy": "randaugment", "policy_magnitude": 21, "policy_magnitude_std": 1.5, "policy_probability": 0.5},
    {"policy": "trivialaugment"},
    {"policy": "augmix"},
    {"color_jitter": (0.4, 0.4, 0.4, 0.1)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_key_alone_decides_and_nobody_else_notices(settings: dict[str, Any], channels: int) -> None:
    policy = Policy(AugmentConfig(**settings))
    before = torch.random.get_rng_state()
    image = IMAGE[:channels]
    seen = [policy(image, key) for key in range(8)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(each.shape == image.shape and each.dtype == torch.uint8 for each in seen)
    assert len({each.numpy().tobytes() for each in seen}) > 3
    torch.manual_seed(99)
    assert all(torch.equal(Policy(AugmentConfig(**settings))(image, key), seen[key]) for key in range(8))


def test_the_arithmetic_and_the_numbers_are_torchvisions() -> None:
    bilinear = v2.InterpolationMode.BILINEAR
    kinds: dict[str, tuple[dict[str, Any], Any]] = {
        "randaugment": ({"policy_magnitude": 15}, v2.RandAugment(2, 15, interpolation=bilinear)),
        "trivialaugment": ({}, v2.TrivialAugmentWide(interpolation=bilinear)),
        "autoaugment": ({}, v2.AutoAugment(interpolation=bilinear)),
        "augmix": ({}, v2.AugMix()),
    }
    for name, (settings, theirs) in kinds.items():
        for key in range(12):
            torch.manual_seed(key)
            expected = theirs(IMAGE)
            assert torch.equal(Policy(AugmentConfig(policy=name, **settings))(IMAGE, key), expected)


def test_randaugment_has_the_changes_of_its_paper_without_inversion() -> None:
    """What `policy_magnitude` means, 0 to 30, rests on this table of torchvision's."""
    assert list(v2.RandAugment._AUGMENTATION_SPACE) == [
        *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast"),
        *("Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
    ]
    assert inspect.signature(v2.RandAugment).parameters["num_magnitude_bins"].default == 31


def test_a_varied_magnitude_is_drawn_for_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[int] = Counter()
    forward = v2.RandAugment.forward

    def noted(self: Any, *inputs: Any) -> Any:
        seen[self.magnitude] += 1
        return forward(self, *inputs)

    monkeypatch.setattr(v2.RandAugment, "forward", noted)
    settings: dict[str, Any] = {"policy_magnitude": 29, "policy_magnitude_std": 1.5, "policy_probability": 0.5}
    policy = Policy(AugmentConfig(policy="randaugment", policy_ops=4, **settings))
    for key in range(500):
        policy(IMAGE, key)
    # Half of 2,000. Normal around 29 with a deviation of 1.5, and what is above goes to 30: by its distribution
    # function, 0.369 are 30 and 0.261 are 29. Five standard deviations are 112, 76 and 69.
    assert abs(seen.total() - 1000) < 112
    assert abs(seen[30] - 369) < 95
    assert abs(seen[29] - 261) < 85
    assert min(seen) >= 22


def test_images_that_are_no_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"need uint8 images, and those of the data set are torch.float32; have it"):
        Policy(AugmentConfig(policy="augmix"))(IMAGE.float(), 0)


def test_single_images_cannot_be_changed_on_the_device() -> None:
    with pytest.raises(ValueError, match="residency: device has no workers for augment"):
        DataConfig(residency="device", augment=AugmentConfig(policy="augmix"))
    assert DataConfig(residency="device", augment=AugmentConfig(erasing=0.1)).augment.erasing == 0.1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"color_jitter": (0.4, 0.4, 0.4, 0.6)}, r"a hue of 0.6 is more than 0.5"),
        ({"policy": "augmix", "policy_magnitude": 5}, "need policy: randaugment"),
        ({"policy_probability": 0.5}, "need policy: randaugment"),
        ({"erasing_mode": "noise"}, "erasing_mode needs erasing"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AugmentConfig(**settings)
