"""Mixup and CutMix: images of a batch mixed in pairs, their classes with them.

Partners are neighbours in the global batch, and batches are cut between pairs. So the number of processes does not
change who is mixed with whom, as it would if each rank turned its own part around, which torchvision and timm do.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.augment_section import AugmentConfig
from trainer.data.boxes import box, span
from trainer.data.order import key_of, random_integers
from trainer.data.streams import Stream

_IF, _WHICH, _MIXUP, _CUTMIX, _Y, _X = range(6)
_QUANTILES = 2**16
_BITS = 24
"""Shares are multiples of 2**-24, so that a share and the rest are both exact in float32, and add up to 1."""


class Mixing:
    """Each pair is mixed by a share, and with CutMix in a box, of its own, drawn by (seed, epoch, pair)."""

    def __init__(self, config: AugmentConfig, seed: int, num_classes: int, device: torch.device) -> None:
        self._config, self._seed, self._num_classes, self._device = config, seed, num_classes, device
        self._mixup, self._cutmix = (
            beta_quantiles(alpha, _QUANTILES).float().to(device) if alpha else None
            for alpha in (config.mixup, config.cutmix)
        )

    def __call__(self, images: Tensor, labels: Tensor, epoch: int, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Floating images (B, C, H, W), labels (B,) and RankBatch.draws (B,) to mixed images and targets (B, classes)
        that sum to 1. The first two are a pair; the last of an odd number has no partner and stays as it is."""
        partners = partners_of(len(images), images.device)
        first = torch.minimum(partners, partners[partners])
        pairs = draws.to(images.device)[first]  # a pair is known by its first sample
        share, weight = self._weights(images, epoch, pairs)
        targets = F.one_hot(labels, self._num_classes).to(images.dtype)
        # lerp gives back a value that is on both sides, and either side for a weight of 0 or 1, to the bit.
        return images.lerp(images[partners], weight), targets.lerp(targets[partners], share.view(-1, 1))

    def _weights(self, images: Tensor, epoch: int, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """What each image has of its partner: the share (B,), and by pixel, (B, 1, H, W) or (B, 1, 1, 1)."""
        mixup = self._quantile(self._mixup, _MIXUP, epoch, pairs)
        share, weight = mixup, mixup.view(-1, 1, 1, 1)
        if self._cutmix is not None:
            share, weight = self._cut(images, epoch, pairs)
        if self._cutmix is not None and self._mixup is not None:
            cuts = self._happens(self._config.mix_switch, _WHICH, epoch, pairs)
            share = torch.where(cuts, share, mixup)
            weight = torch.where(cuts.view(-1, 1, 1, 1), weight, mixup.view(-1, 1, 1, 1))
        if self._config.mix_probability < 1:
            happens = self._happens(self._config.mix_probability, _IF, epoch, pairs)
            share, weight = share * happens, weight * happens.view(-1, 1, 1, 1)
        return share.to(images.dtype), weight.to(images.dtype)

    def _cut(self, images: Tensor, epoch: int, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """The share of the box in the area, and 1 inside of it.

        Yun et al., https://arxiv.org/abs/1905.04899: the centre is anywhere, and what sticks out is cut off.
        """
        height, width = images.shape[2:]
        side = self._quantile(self._cutmix, _CUTMIX, epoch, pairs).sqrt()
        rows, columns = (self._span(kind, epoch, pairs, side, length) for kind, length in ((_Y, height), (_X, width)))
        area = rows.sum(1) * columns.sum(1)
        share = (area * 2**_BITS + height * width // 2) // (height * width)
        return share.float() * 2.0**-_BITS, box(rows, columns).float()

    def _span(self, kind: int, epoch: int, pairs: Tensor, side: Tensor, length: int) -> Tensor:
        reach = (side * length).long() // 2
        return span(self._draw(kind, epoch, pairs, length) - reach, 2 * reach, length)

    def _quantile(self, table: Tensor | None, kind: int, epoch: int, pairs: Tensor) -> Tensor:
        if table is None:
            return torch.zeros(len(pairs), device=self._device)
        return table[self._draw(kind, epoch, pairs, len(table))]

    def _happens(self, probability: float, kind: int, epoch: int, pairs: Tensor) -> Tensor:
        return self._draw(kind, epoch, pairs, 2**_BITS).lt(round(probability * 2**_BITS))

    def _draw(self, kind: int, epoch: int, pairs: Tensor, bound: int) -> Tensor:
        return random_integers(key_of(self._seed, epoch, Stream.MIX, kind), pairs, bound)


def partners_of(count: int, device: torch.device) -> Tensor:
    """1, 0, 3, 2, ...; the last of an odd number is its own. int64 of shape (count,)."""
    return (torch.arange(count, device=device) ^ 1).clamp(max=count - 1)


def beta_quantiles(alpha: float, count: int) -> Tensor:
    """The quantiles (i + 1/2) / `count` of Beta(alpha, alpha), float64 (count,), rounded to multiples of 2**-24.

    Of the lower half, by the integral of its density; for alpha below 1 over t = (2x)**alpha, which takes away its
    pole. The upper half is its mirror image.
    """
    t = np.linspace(0.0, 1.0, 2**18 + 1)
    power = min(alpha, 1.0)
    rest = 2 - t ** (1 / power)  # 2 (1 - x)
    density = (rest if alpha < 1 else t * rest) ** (alpha - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    wanted = (np.arange(count // 2) + 0.5) / (count // 2) * below[-1]
    lower = np.interp(wanted, below, t) ** (1 / power) / 2
    lower = np.round(lower * 2**_BITS) / 2**_BITS
    return torch.from_numpy(np.concatenate([lower, 1 - lower[::-1]]))
