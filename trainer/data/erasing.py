"""Random erasing (Zhong et al., https://arxiv.org/abs/1708.04896) of a whole batch on the device."""

import math
from functools import cache

import torch
from torch import Tensor

from trainer.data.boxes import box, span
from trainer.data.order import hash_of, random_integers

_TRIES = 10
_AREA = (0.02, 1 / 3)
_RATIO, _RATIOS = 0.3, 1024
_BITS = 24
# One sample's numbers: whether, where, and for each try the area and the ratio.
_IF, _TOP, _LEFT, _TRY, _STRIDE = 0, 1, 2, 3, 32


def boxes_to_erase(shape: torch.Size, probability: float, key: int, draws: Tensor) -> Tensor:
    """Bool (B, 1, H, W), True inside the box of each image of `shape` (B, C, H, W) that has one; `draws` (B,) int64 are
    on the device of the result.

    The box is that of timm and, but for a hundredth in area and ratio, of torchvision: the first of ten tries that is
    smaller than the image.
    """
    height, width = shape[2:]
    places = draws.unsqueeze(1) * _STRIDE + torch.arange(_STRIDE, device=draws.device)
    numbers = random_integers(key, places, 2**_BITS)
    tries = numbers[:, _TRY : _TRY + 2 * _TRIES]
    share = _AREA[0] + tries[:, :_TRIES].float() * (2.0**-_BITS * (_AREA[1] - _AREA[0]))
    stretch = _stretches(draws.device)[tries[:, _TRIES:] % _RATIOS]
    side = (share * (height * width)).sqrt()
    tall, wide = (side * stretch).round().long(), (side / stretch).round().long()
    fits = (tall < height) & (wide < width)
    first = (fits * torch.arange(_TRIES, 0, -1, device=draws.device)).argmax(1, keepdim=True)
    is_erased = fits.any(1) & (numbers[:, _IF] < round(probability * 2**_BITS))
    rows = _anywhere(numbers[:, _TOP], tall.gather(1, first).squeeze(1), height)
    columns = _anywhere(numbers[:, _LEFT], wide.gather(1, first).squeeze(1), width)
    return box(rows & is_erased.unsqueeze(1), columns)


@cache
def _stretches(device: torch.device) -> Tensor:
    """Roots of the ratios of height to width, which are even in their logarithm. A table, as exp differs by a rounding
    between devices; copied to each once, as that waits for it."""
    low = math.log(_RATIO)
    return (torch.linspace(low, -low, _RATIOS, dtype=torch.float64) / 2).exp().float().to(device)


def _anywhere(numbers: Tensor, size: Tensor, length: int) -> Tensor:
    """Bool (B, length): `size` places in a row, anywhere."""
    return span((numbers * (length - size + 1)) >> _BITS, size, length)


def noise(shape: torch.Size, key: int, draws: Tensor) -> Tensor:
    """Standard normal numbers, float32 of `shape` (B, C, H, W), those of each image by its draw. Takes two dozen bytes
    of memory for each."""
    values = math.prod(shape[1:])
    places = draws.view(-1, 1) * values + torch.arange(values, device=draws.device)
    hashes = hash_of(key, places)
    one, other = ((hashes >> shift & (2**_BITS - 1)).float() * 2.0**-_BITS for shift in (0, _BITS))
    # Box and Muller's; 1 - u is never 0.
    return ((-2 * torch.log1p(-one)).sqrt() * torch.cos(2 * math.pi * other)).view(shape)
