"""Random changes of single images in the loader workers, by torchvision's transforms: AutoAugment and its kin, colour
jitter, erasing. torchvision takes 2 s to import, so it is imported only where one of them is wanted."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from configs.data_section import AugmentConfig

POLICY = 7
"""The stream of random numbers; those before are in augment.py and mixing.py."""


class Policy:
    """What `config` says, on uint8 images (C, H, W)."""

    def __init__(self, config: AugmentConfig, mean: tuple[float, ...] | None) -> None:
        self._config = config
        self._fill = [255 * value for value in mean] if mean else 0.0

    def __call__(self, image: Tensor, key: int) -> Tensor:
        """Changed by the numbers that `key` gives; torch's generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key % 2**63)
            changed: Tensor = self._transform(image)
        return changed

    @cached_property
    def _transform(self) -> Callable[[Tensor], Tensor]:
        from torchvision.transforms import v2

        config, steps = self._config, list[Any]()
        if config.policy == "autoaugment":
            steps.append(v2.AutoAugment())
        if config.policy == "randaugment":
            steps.append(v2.RandAugment(config.policy_ops, config.policy_magnitude))
        if config.policy == "trivialaugment":
            steps.append(v2.TrivialAugmentWide())
        if config.policy == "augmix":
            steps.append(v2.AugMix())
        if config.color_jitter is not None:
            steps.append(v2.ColorJitter(*config.color_jitter))
        if config.erasing:
            steps.append(v2.RandomErasing(config.erasing, value=self._fill))
        compose: Callable[[Tensor], Tensor] = v2.Compose(steps)
        return compose
