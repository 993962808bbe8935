"""Mixup and CutMix: images of a batch mixed in pairs, their classes with them.

Positions 2i and 2i + 1 of the global batch are a pair, and batches are cut between pairs. So the number of processes
does not change who is mixed with whom, as it would if each rank turned its own part around, which torchvision does.
"""

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.data_section import AugmentConfig
from trainer.data.order import key_of

MIX = 6
"""The stream of random numbers; those before are in augment.py."""


class Mixing:
    """One weight, and with CutMix one box, for a whole global batch, drawn by (seed, epoch, batch): as timm and
    torchvision do it."""

    def __init__(self, config: AugmentConfig, seed: int, num_classes: int) -> None:
        self._config, self._seed, self._num_classes = config, seed, num_classes

    def __call__(self, images: Tensor, labels: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        """Floating images (B, C, H, W) and labels (B,) to mixed images and targets (B, classes) that sum to 1.

        B is even, or the last image has no partner and stays as it is.
        """
        draws = random.Random(key_of(self._seed, epoch, MIX, batch))  # noqa: S311  # no secret
        targets = F.one_hot(labels, self._num_classes).to(images.dtype)
        if draws.random() >= self._config.mix_probability:
            return images, targets
        partners = partners_of(len(images), images.device)
        if self._cuts(draws):
            images, weight = cutmix(images, partners, draws.betavariate(*2 * (self._config.cutmix,)), draws)
        else:
            weight = draws.betavariate(*2 * (self._config.mixup,))
            images = images * weight + images[partners] * (1 - weight)
        return images, targets * weight + targets[partners] * (1 - weight)

    def _cuts(self, draws: random.Random) -> bool:
        """Whether it is CutMix this time, where there is mixup too."""
        switch = draws.random() < self._config.mix_switch
        return self._config.cutmix > 0 and (switch or self._config.mixup == 0)


def partners_of(count: int, device: torch.device) -> Tensor:
    """1, 0, 3, 2, ...; the last of an odd number is its own. int64 of shape (count,)."""
    return (torch.arange(count, device=device) ^ 1).clamp(max=count - 1)


def cutmix(images: Tensor, partners: Tensor, weight: float, draws: random.Random) -> tuple[Tensor, float]:
    """Put a box of each partner, of about 1 - `weight` of the area, into each image; returns the share that is left.

    Yun et al., https://arxiv.org/abs/1905.04899: the centre is anywhere, and what sticks out is cut off.
    """
    height, width = images.shape[2:]
    side = (1 - weight) ** 0.5
    y, x = draws.randrange(height), draws.randrange(width)
    half_height, half_width = int(height * side) // 2, int(width * side) // 2
    rows = slice(max(y - half_height, 0), min(y + half_height, height))
    columns = slice(max(x - half_width, 0), min(x + half_width, width))
    mixed = images.clone()
    mixed[:, :, rows, columns] = images[partners][:, :, rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return mixed, 1 - area / (height * width)
