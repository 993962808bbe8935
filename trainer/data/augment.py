"""Images of a whole batch, changed and normalised on the device. What is random is keyed by (seed, epoch, sample)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.augment_section import AugmentConfig
from configs.errors import ConfigError
from trainer.data.boxes import box, span
from trainer.data.erasing import boxes_to_erase, noise
from trainer.data.order import key_of, random_integers
from trainer.data.streams import Stream

_LARGE = 2**16
"""Values of an image beyond which a CPU takes one at a time: a call costs less than memory does for a whole batch."""
_NOISY_AT_ONCE = 16
"""Images: noise takes two dozen bytes of memory for each value."""


def shift_reflected(images: Tensor, dy: Tensor, dx: Tensor, reach: int) -> Tensor:
    """As shift(); what comes in is the image mirrored at its edge pixels. Raises ConfigError where it is too small."""
    if reach >= min(images.shape[2:]):
        raise ConfigError(
            f"data.augment.shift_padding: reflect mirrors less than an image's side of {min(images.shape[2:])} pixels, "
            f"and shift is {reach}"
        )
    rows, columns = (
        _reflected(torch.arange(side, device=images.device) + (d - reach)[:, None], side)
        for side, d in zip(images.shape[2:], (dy, dx), strict=True)
    )
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    return images.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _reflected(places: Tensor, side: int) -> Tensor:
    return side - 1 - (side - 1 - places.abs()).abs()


def shift(images: Tensor, dy: Tensor, dx: Tensor, reach: int) -> Tensor:
    """Move image i of (B, C, H, W) by (dy[i] - reach, dx[i] - reach)
    pixels, 0 <= dy, dx <= 2 * reach; zeros come in."""
    height, width = images.shape[2:]
    windows = F.pad(images, (reach,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(images), device=images.device), :, dy, dx]


def cutout_mask(images: Tensor, y: Tensor, x: Tensor, side: int) -> Tensor:
    """Bool (B, 1, H, W), False inside the square of `side` pixels whose centre is (y[i], x[i]); it may stick out."""
    rows, columns = (
        span(centre - side // 2, side, length) for centre, length in zip((y, x), images.shape[2:], strict=True)
    )
    return ~box(rows, columns)


class Preprocess:
    """uint8 (or already floating) images of shape (B, C, H, W) to normalised floating ones.

    uint8 pixels become (x / 255 - mean) / std in the order of torchvision's ToTensor and Normalize, so the values are
    the same bit for bit; floating images are not divided by 255.
    """

    def __init__(
        self,
        augment: AugmentConfig,
        seed: int,
        mean: tuple[float, ...] | None,
        std: tuple[float, ...] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.augment = augment
        self.seed = seed
        self.dtype = dtype
        self.device = device
        self.mean = None if mean is None else torch.tensor(mean, dtype=dtype, device=device).view(1, -1, 1, 1)
        self.std = None if std is None else torch.tensor(std, dtype=dtype, device=device).view(1, -1, 1, 1)

    def for_training(self, images: Tensor, epoch: int, ids: Tensor) -> Tensor:
        """Augment and normalise; `ids` (B,) int64 are RankBatch.draws."""
        augment = self.augment
        if augment.shift:
            dy, dx = (self._draw(kind, epoch, ids, 2 * augment.shift + 1) for kind in (Stream.SHIFT_Y, Stream.SHIFT_X))
            move = shift if augment.shift_padding == "zeros" else shift_reflected
            images = move(images, dy, dx, augment.shift)
        mirrored = self._mirrored(epoch, ids) if augment.flip else None
        if self._goes_one_by_one(images):
            images = self._one_by_one(images, mirrored)
        else:
            if mirrored is not None:
                images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(3), images)
            images = self._as_batch(images)
        if augment.cutout:
            y, x = (
                self._draw(kind, epoch, ids, side)
                for kind, side in ((Stream.CUTOUT_Y, images.shape[2]), (Stream.CUTOUT_X, images.shape[3]))
            )
            images = images * cutout_mask(images, y, x, augment.cutout)
        return self._erase(images, epoch, ids.to(self.device)) if augment.erasing else images

    def _mirrored(self, epoch: int, ids: Tensor) -> Tensor:
        """Bool (B,). Alternating: as drawn for epoch 0, and the other way in each odd one (Jordan,
        https://arxiv.org/abs/2404.00498)."""
        if self.augment.flip == "alternating":
            return self._draw(Stream.FLIP, 0, ids, 2).bool() ^ bool(epoch % 2)
        return self._draw(Stream.FLIP, epoch, ids, 2).bool()

    def _erase(self, images: Tensor, epoch: int, ids: Tensor) -> Tensor:
        erased = boxes_to_erase(images.shape, self.augment.erasing, key_of(self.seed, epoch, Stream.ERASING), ids)
        if self.augment.erasing_mode == "mean":
            return images.masked_fill_(erased, 0.0)
        key = key_of(self.seed, epoch, Stream.NOISE)
        chosen = torch.arange(len(ids), device=ids.device)
        if ids.device.type == "cpu":  # a GPU would have to be waited for
            chosen = chosen[erased.flatten(1).any(1)]
        for part in chosen.split(_NOISY_AT_ONCE):
            own = images[part]
            other = noise(own.shape, key, ids[part]).to(images.dtype)
            images[part] = torch.where(erased[part], other, own)
        return images

    def normalise(self, images: Tensor) -> Tensor:
        """What evaluation sees."""
        return self._one_by_one(images, None) if self._goes_one_by_one(images) else self._as_batch(images)

    def _as_batch(self, images: Tensor) -> Tensor:
        # A new tensor in either case: what follows is in place.
        is_float = images.is_floating_point()
        images = images.to(self.dtype, copy=True) if is_float else images.to(self.dtype).div_(255)
        if self.mean is not None and self.std is not None:
            images.sub_(self.mean).div_(self.std)
        return images

    def _goes_one_by_one(self, images: Tensor) -> bool:
        is_large = images.numel() > _LARGE * len(images)
        return is_large and self.device.type == "cpu" and images.dtype == torch.uint8

    def _one_by_one(self, images: Tensor, mirrored: Tensor | None) -> Tensor:
        """What else is done to the batch, in the core's own cache: the same bits in a third of the time."""
        result = torch.empty_like(images, dtype=self.dtype)
        is_mirrored = [False] * len(images) if mirrored is None else mirrored.tolist()
        for image, target, mirrors in zip(images, result, is_mirrored, strict=True):
            target.copy_(image.flip(2) if mirrors else image).div_(255)
            if self.mean is not None and self.std is not None:
                target.sub_(self.mean[0]).div_(self.std[0])
        return result

    def _draw(self, kind: Stream, epoch: int, ids: Tensor, bound: int) -> Tensor:
        return random_integers(key_of(self.seed, epoch, kind), ids.to(self.device), bound)
