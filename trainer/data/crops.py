"""What of an image becomes a square of pixels: a random crop in training, the centre in evaluation."""

import math
from collections.abc import Iterator

from trainer.data.decode import Box, Square, View
from trainer.data.order import uniforms

Range = tuple[float, float]
_TRIES = 10


def random_view(key: int, side: int, scale: Range, ratio: Range, interpolation: str = "bilinear") -> View:
    """A crop drawn by `key`, as a square of `side` pixels."""
    return lambda width, height: Square(
        random_box(uniforms(key), width, height, scale, ratio), side, is_cut=True, interpolation=interpolation
    )


def centre_view(side: int, resize: int, interpolation: str = "bilinear") -> View:
    """The middle square of `side` pixels of the image whose shorter side is resized to `resize` pixels."""
    return lambda width, height: Square(
        centre_box(width, height, side, resize), side, is_cut=False, interpolation=interpolation
    )


def random_box(draws: Iterator[float], width: int, height: int, scale: Range, ratio: Range) -> Box:
    """A part of the area, in `scale`, of a ratio of width to height in `ratio`, anywhere; whole pixels.

    That of torchvision's RandomResizedCrop (Szegedy et al., https://arxiv.org/abs/1409.4842): ten tries, then the
    largest in the middle that has a ratio as near as can be.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_TRIES):
        area = width * height * _between(*scale, next(draws))
        aspect = math.exp(_between(low, high, next(draws)))
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(next(draws) * (height - crop_height + 1))
            left = int(next(draws) * (width - crop_width + 1))
            return left, top, left + crop_width, top + crop_height
    aspect = min(max(width / height, ratio[0]), ratio[1])
    crop_width, crop_height = min(width, max(1, round(height * aspect))), min(height, max(1, round(width / aspect)))
    left, top = (width - crop_width) // 2, (height - crop_height) // 2
    return left, top, left + crop_width, top + crop_height


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def centre_box(width: int, height: int, side: int, resize: int) -> Box:
    """In pixels of the image as it is, so that nothing outside the square is ever resized."""
    short = min(width, height)
    new_width, new_height = (resize * width // short, resize * height // short)  # as torchvision cuts it off
    left, top = round((new_width - side) / 2), round((new_height - side) / 2)
    x, y = width / new_width, height / new_height
    return left * x, top * y, min(width, (left + side) * x), min(height, (top + side) * y)
