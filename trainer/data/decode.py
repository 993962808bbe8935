"""Any image to the 8-bit pixels that a viewer shows: by Pillow, or to the same pixels, faster, by jpeg.py."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from configs.errors import first_line
from trainer.data import jpeg

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels of the upright image."""
Pixels = NDArray[np.uint8]
"""(H, W) or (H, W, 3)."""


class Square(NamedTuple):
    """A part of an image, and the side in pixels of the square that it becomes."""

    box: Box
    side: int
    is_cut: bool = False
    """The filter sees nothing outside the box, as in torchvision's RandomResizedCrop; the box has whole pixels."""
    interpolation: str = "bilinear"
    """Or bicubic."""


View = Callable[[int, int], Square | None]
"""(width, height) of the upright image to what of it is wanted; None: all of it, as it is."""

MAX_PIXELS = 20_000 * 20_000
"""1.2 GB in RGB. A file of some kilobytes can claim to be any size."""
# By content, whatever the name says. Pillow knows others: some are documents, which it has another program render.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "AVIF", "JPEG2000", "TIFF", "WEBP")
_MODES = {1: "L", 3: "RGB"}
_WIDE = {"F": "floating-point numbers", "I": "32-bit numbers"}
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_ORIENTATION = 0x0112
_SCALABLE = ("JPEG", "MPO")
_SPARE = 2.0
"""Pixels per pixel of the result that scaled decoding leaves. Measured on photographs, off from decoding in full: by
0.4 of 256 levels in the mean, 1.0 at most for an image; with 1.5 by 0.6 and 1.6, with 1 by 1.0 and 4.2."""
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TURNED = [_UPRIGHT[orientation] for orientation in (5, 6, 7, 8)]
# Those whose left, or upper, edge was stored as the last column or row.
_FROM_RIGHT = [_UPRIGHT[orientation] for orientation in (2, 3, 6, 7)]
_FROM_BOTTOM = [_UPRIGHT[orientation] for orientation in (3, 4, 7, 8)]


class DecodingError(Exception):
    """The file is no image, or not a whole one; the text says why, without the file's name."""


def whole(width: int, height: int) -> None:
    """The view of an image as it is."""


def read_pixels(source: str | BinaryIO, channels: int, view: View = whole) -> Tensor:
    """The image as uint8 of shape (channels, H, W), upright, transparency on white; `channels` is 1 or 3.

    16-bit values keep their high byte. Of several frames or pages it is the first. Colour profiles are not applied.
    Raises DecodingError for what the file is to blame for, OSError for what the system is.
    """
    with _blaming_the_file(source):
        pixels = _read_jpeg(source, channels, view)
        if pixels is None:
            pixels = _read_any(source, channels, view)
    return pixels


def _in_planes(pixels: Pixels) -> Tensor:
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _read_jpeg(source: str | BinaryIO, channels: int, view: View) -> Tensor | None:
    """None: this is for Pillow."""
    data = jpeg.bytes_of(source)
    header = None if data is None else jpeg.header_of(data)
    if data is None or header is None or header.width * header.height > MAX_PIXELS:
        return None
    if header.may_be_turned and _is_turned(data):
        return None
    wanted = view(header.width, header.height)
    factor = _shrinks_by(wanted)
    pixels = jpeg.decode(data, header, channels, factor)
    if pixels is None:
        return None
    if wanted is None:
        return _in_planes(pixels)
    if wanted.is_cut and factor == 1:
        return _cut(pixels, wanted)
    return _resized(Image.fromarray(pixels), _scaled(wanted.box, factor), wanted)


def _is_turned(data: bytes) -> bool:
    with _quiet(), Image.open(io.BytesIO(data), formats=_formats()) as image:
        return _orientation(image) in _UPRIGHT


def _read_any(source: str | BinaryIO, channels: int, view: View) -> Tensor:
    with _quiet(), Image.open(source, formats=_formats()) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise DecodingError(f"it has {width} x {height} pixels, more than {MAX_PIXELS:,}")
        return _seen(image, _MODES[channels], view)


def _seen(image: Image.Image, mode: str, view: View) -> Tensor:
    if image.format not in _SCALABLE:
        image.load()  # some formats tell only then which way is up
    method = _UPRIGHT.get(_orientation(image))
    width, height = image.size[::-1] if method in _TURNED else image.size
    wanted = view(width, height)
    factor = _shrinks_by(wanted) if image.format in _SCALABLE else 1
    if factor > 1:
        image.draft(None, (image.width // factor, image.height // factor))
    image.load()
    image = eight_bit(image, mode)
    if method is not None:
        image = image.transpose(method)
    if wanted is None:
        return _in_planes(np.array(image))
    if wanted.is_cut and factor == 1:
        return _cut(np.array(image), wanted)
    # A smaller image has whole pixels: the last one, which is the first of a turned image, may reach over the edge.
    x = image.width - width / factor if method in _FROM_RIGHT else 0
    y = image.height - height / factor if method in _FROM_BOTTOM else 0
    return _resized(image, _scaled(wanted.box, factor, x, y), wanted)


def _shrinks_by(wanted: Square | None) -> int:
    """Whether a JPEG is decoded at 1/2, 1/4 or 1/8 of its size, where enough of it remains: 1, 2, 4 or 8."""
    if wanted is None:
        return 1
    left, top, right, bottom = wanted.box
    smallest = min(right - left, bottom - top)
    return next((factor for factor in (8, 4, 2) if smallest >= factor * _SPARE * wanted.side), 1)


def _scaled(box: Box, factor: int, x: float = 0, y: float = 0) -> Box:
    left, top, right, bottom = (edge / factor for edge in box)
    return x + left, y + top, x + right, y + bottom


def _resized(image: Image.Image, box: Box, wanted: Square) -> Tensor:
    """By Pillow: any box, whose surroundings the filter sees, as if the whole image were resized and then cut."""
    size = (wanted.side, wanted.side)
    return _in_planes(np.array(image.resize(size, _FILTERS[wanted.interpolation], box)))


def _cut(pixels: Pixels, wanted: Square) -> Tensor:
    """By torch: within 1 of Pillow's levels on the cut image, in 0.4 of the time. Its kernel for bytes computes in
    integers, with and without AVX2 to the same bits."""
    left, top, right, bottom = map(int, wanted.box)
    size, mode = (wanted.side, wanted.side), wanted.interpolation
    part = torch.from_numpy(np.ascontiguousarray(pixels[top:bottom, left:right]))  # torch copies pixel by pixel
    part = part.unsqueeze(0) if part.ndim == 2 else part.permute(2, 0, 1)
    return F.interpolate(part.unsqueeze(0), size, mode=mode, antialias=True).squeeze(0).contiguous()


def eight_bit(image: Image.Image, mode: str) -> Image.Image:
    """`image` in `mode`, L or RGB, over white where it is transparent."""
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):  # there it is 16 bits
        raise DecodingError(f"its pixels are {_WIDE[image.mode]}, and nothing says what is white")
    if image.mode.startswith("I"):
        image = _high_byte(image)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    if image.mode not in ("1", "L", "P", "RGB"):
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def _high_byte(image: Image.Image) -> Image.Image:
    """Grey of 16 bits as Pillow takes colours of 16 bits; versions differ in what they call such an image."""
    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    if isinstance(key := image.info.get("transparency"), int):
        grey[values == key] = 255
    return Image.fromarray(grey)


def _orientation(image: Image.Image) -> int:
    """EXIF's, 1 where it cannot be read: a viewer shows such an image all the same."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) else 1


@cache
def _formats() -> list[str]:
    """Those that this Pillow can read: AVIF came with 11.3, and some builds lack others. Imports all plug-ins, once."""
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


@contextlib.contextmanager
def _blaming_the_file(source: str | BinaryIO) -> Iterator[None]:
    """Pillow's plug-ins raise whatever the bytes lead them to."""
    try:
        yield
    except (DecodingError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise DecodingError("it is empty" if _is_empty(source) else "it is no image that can be read") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DecodingError(first_line(error) or type(error).__name__) from error


def _is_empty(source: str | BinaryIO) -> bool:
    return (Path(source).stat().st_size if isinstance(source, str) else source.seek(0, io.SEEK_END)) == 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Pillow's warnings (of odd EXIF, of sizes), and with our limit of the size in place of its own."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before
