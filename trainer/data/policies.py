"""Random changes of single images in the loader workers, by torchvision's transforms: AutoAugment and its kin, and
colour jitter. torchvision takes 2 s to import, so it is imported only where one of them is wanted."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from configs.augment_section import AugmentConfig
from configs.errors import ConfigError

_STRENGTHS = 31
"""Of torchvision's RandAugment: magnitudes from 0 to 30."""


class Policy:
    """What `config` says, on uint8 images (C, H, W). Made once, before the loader workers are forked."""

    def __init__(self, config: AugmentConfig) -> None:
        from torchvision.transforms import v2

        steps: list[Any] = []
        if config.policy != "none":
            steps.append(_policy(v2, config))
        if config.color_jitter is not None:
            steps.append(v2.ColorJitter(*config.color_jitter))
        self._transform = v2.Compose(steps)

    def __call__(self, image: Tensor, key: int) -> Tensor:
        """Changed by the numbers that `key` gives; torch's generators are left as they were."""
        if image.dtype != torch.uint8:
            raise ConfigError(
                f"data.augment.policy and color_jitter need uint8 images, and those of the data set are {image.dtype}; "
                "have it give PIL images or bytes, and normalise by data.mean and data.std"
            )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key % 2**63)  # torch.manual_seed would seed a GPU's generator, too
            changed: Tensor = self._transform(image)
        return changed


def _policy(v2: Any, config: AugmentConfig) -> Callable[[Tensor], Tensor]:
    """As in torchvision's recipes, bilinear where an image is turned or sheared."""
    smooth = {"interpolation": v2.InterpolationMode.BILINEAR}
    found: Callable[[Tensor], Tensor]
    if config.policy == "autoaugment":
        found = v2.AutoAugment(**smooth)
    elif config.policy == "trivialaugment":
        found = v2.TrivialAugmentWide(**smooth)
    elif config.policy == "augmix":
        found = v2.AugMix(**smooth)
    elif config.policy_magnitude_std == 0 and config.policy_probability == 1:
        found = v2.RandAugment(config.policy_ops, config.policy_magnitude, **smooth)
    else:
        found = partial(_varied, config, [v2.RandAugment(1, strength, **smooth) for strength in range(_STRENGTHS)])
    return found


def _varied(config: AugmentConfig, changes: Sequence[Callable[[Tensor], Tensor]], image: Tensor) -> Tensor:
    """RandAugment with timm's two additions: each change has a magnitude of its own, and may be left out."""
    for _ in range(config.policy_ops):
        happens = float(torch.rand(())) < config.policy_probability
        strength = config.policy_magnitude + config.policy_magnitude_std * float(torch.randn(()))
        if happens:
            image = changes[round(min(max(strength, 0.0), _STRENGTHS - 1.0))](image)
    return image
