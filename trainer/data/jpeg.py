"""JPEGs by simplejpeg where it is installed: libjpeg-turbo, as in Pillow, straight into an array.

The same pixels, bit for bit (docs/decisions/0014-jpeg-decoder.md). Whatever it would not decode as Pillow does, or
refuses, is left to Pillow, which reads it, or says what is wrong with it, as it would alone.
"""

import importlib
import struct
from functools import cache
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import features

_START = b"\xff\xd8\xff"
_AT_ONCE = 2**17
"""Bytes that are read to see what a file is: most photographs are smaller, and then nothing is put together."""
_SCAN, _APP1 = 0xDA, 0xE1
# Baseline, extended and progressive; not those of arithmetic coding or without loss.
_FRAMES = (0xC0, 0xC1, 0xC2)
# Huffman tables, quantisation, restarts, comments; JFIF, ICC and MPF, Photoshop's and Adobe's.
_HARMLESS = (0xC4, 0xDB, 0xDD, 0xFE, 0xE0, 0xE2, 0xED, 0xEE, _APP1)


class Header(NamedTuple):
    """What a JPEG says of itself before its pixels."""

    width: int
    height: int
    components: int
    may_be_turned: bool
    """EXIF or XMP is there, which may say that another side is up."""


@cache
def library() -> Any:
    """The module simplejpeg; None where it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def decoders() -> str:
    """What decodes images here, with versions: what their pixels depend on."""
    turbo = features.version("libjpeg_turbo")  # None: of another libjpeg, whose pixels differ
    pillow = f"Pillow {PIL.__version__} (libjpeg{'' if turbo is None else f'-turbo {turbo}'})"
    return pillow if library() is None else f"simplejpeg {library().__version__}, {pillow}"


def describe() -> str:
    """`decoders`, for the plan screen."""
    if library() is None:
        return f"images     by {decoders()}; simplejpeg, which is not installed, reads JPEGs faster: the same pixels"
    return f"images     by {decoders()}"


def bytes_of(source: str | BinaryIO) -> bytes | None:
    """The content, if it is that of a JPEG that `decode` may be able to read. A file object stays at its beginning."""
    if library() is None:
        return None
    if isinstance(source, str):
        with open(source, "rb", buffering=0) as file:
            return _read(file)
    content = _read(source)
    source.seek(0)
    return content


def _read(file: Any) -> bytes | None:
    start: bytes = file.read(_AT_ONCE)
    if not start.startswith(_START):
        return None
    rest = file.read()
    return start + rest if rest else start


def header_of(data: bytes) -> Header | None:
    """None if there is anything in it that is not of an ordinary JPEG, grey or in colour, of 8 bits."""
    frame: tuple[int, int, int] | None = None
    may_be_turned, at = False, 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == _SCAN:
            return None if frame is None else Header(*frame, may_be_turned)
        if marker in _FRAMES:
            bits, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
            if bits != 8 or components not in (1, 3) or width * height == 0 or frame is not None:
                return None
            frame = width, height, components
        elif marker not in _HARMLESS:
            return None
        may_be_turned = may_be_turned or marker == _APP1
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return None


def decode(data: bytes, header: Header, channels: int, factor: int) -> NDArray[np.uint8] | None:
    """The pixels at 1/`factor` (1, 2, 4 or 8) of the size, (H, W) or (H, W, 3), as they are stored.

    None where it is not certain that Pillow would have the same: grey of a colour image, or a file with any fault.
    """
    if channels == 1 and header.components != 1:
        return None
    height, width = -(-header.height // factor), -(-header.width // factor)
    smallest = {} if factor == 1 else {"min_height": height, "min_width": width}
    try:
        pixels: NDArray[np.uint8] = library().decode_jpeg(data, "RGB" if channels == 3 else "GRAY", **smallest)
    except ValueError:
        return None
    if pixels.shape[:2] != (height, width):
        return None
    return pixels if channels == 3 else pixels[:, :, 0]
