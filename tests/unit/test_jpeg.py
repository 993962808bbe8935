"""JPEGs by simplejpeg have Pillow's pixels, bit for bit, and what it does not read as Pillow does is left to Pillow."""

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from trainer.data import jpeg
from trainer.data.crops import centre_view, random_view
from trainer.data.decode import DecodingError, Square, View, read_pixels, whole

pytest.importorskip("simplejpeg")


def photograph(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Waves, edges and noise."""
    generator = np.random.default_rng(0)
    y, x = np.mgrid[0:height, 0:width]
    waves = [128 + 90 * np.sin(x / 7 + phase) * np.cos(y / 9 - phase) for phase in range(len(mode))]
    pixels = np.stack(waves, axis=2) + 80 * ((x // 13 + y // 11) % 2)[:, :, None]
    pixels = pixels + generator.normal(0, 6, pixels.shape)
    levels = pixels.clip(0, 255).astype(np.uint8)
    return Image.fromarray(levels[:, :, 0] if mode == "L" else levels, mode)


def stored(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, **({"format": "JPEG", "quality": 85} | options))
    return file.getvalue()


def turned_to(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def of_two_frames() -> bytes:
    frames = [photograph(90, 60), photograph(90, 60).transpose(Image.Transpose.FLIP_TOP_BOTTOM)]
    return stored(frames[0], format="MPO", save_all=True, append_images=frames[1:])


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any, int]]:
    """What simplejpeg makes of a file, what Pillow makes of it, and how often simplejpeg decoded it."""
    decoded: list[bool] = []
    decode = jpeg.decode

    def noted(*arguments: Any) -> Any:
        pixels = decode(*arguments)
        decoded.append(pixels is not None)
        return pixels

    def read(data: bytes, channels: int = 3, view: View = whole) -> tuple[Any, Any, int]:
        decoded.clear()
        with monkeypatch.context() as patch:
            patch.setattr(jpeg, "decode", noted)
            fast = outcome(data, channels, view)
            patch.setattr(jpeg, "library", lambda: None)
            plain = outcome(data, channels, view)
        return fast, plain, sum(decoded)

    return read


def outcome(data: bytes, channels: int, view: View) -> Tensor | str:
    try:
        return read_pixels(io.BytesIO(data), channels, view)
    except DecodingError as error:
        return str(error)


def same(one: Tensor | str, other: Tensor | str) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return isinstance(one, str) and one == other


ORDINARY = {
    "4:2:0": stored(photograph(160, 121)),
    "4:2:2": stored(photograph(161, 120), subsampling="4:2:2"),
    "4:4:4": stored(photograph(75, 50), subsampling="4:4:4"),
    "4:1:1": stored(photograph(99, 50), subsampling="4:1:1"),
    "progressive": stored(photograph(160, 121), progressive=True),
    "optimised": stored(photograph(160, 121), optimize=True, quality=30),
    "grey": stored(photograph(64, 65, "L")),
    "grey, progressive": stored(photograph(64, 65, "L"), progressive=True),
    "not converted from RGB": stored(photograph(64, 65), keep_rgb=True),
    "with restarts": stored(photograph(160, 121), restart_marker_blocks=3),
    "with a comment": stored(photograph(64, 65), comment=b"\xff\xda and more"),
    "with a profile": stored(photograph(64, 65), icc_profile=b"\xff\xda" * 40_000),
    "upright by EXIF": stored(photograph(64, 65), exif=turned_to(1)),
    "broken EXIF": stored(photograph(64, 65), exif=b"Exif\0\0broken"),
    "of two frames": of_two_frames(),
    "one pixel": stored(photograph(1, 1)),
    "narrow": stored(photograph(3, 500)),
}
VIEWS: dict[str, View] = {
    "whole": whole,
    "crop": random_view(7, 24, (0.3, 1.0), (0.75, 1.33)),
    "centre": centre_view(24, 28),
    "at a half": centre_view(12, 12),
    "at an eighth": lambda width, height: Square((0, 0, width, height), 1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_jpegs_have_pillows_pixels(kind: str, view: str, both: Callable[..., Any]) -> None:
    fast, plain, count = both(ORDINARY[kind], 3, VIEWS[view])
    assert same(fast, plain)
    assert count == 1
    if kind.startswith("grey"):
        fast, plain, count = both(ORDINARY[kind], 1, VIEWS[view])
        assert same(fast, plain)
        assert count == 1


OTHERS = {
    "turned": stored(photograph(64, 48), exif=turned_to(6)),
    "mirrored": stored(photograph(64, 48), exif=turned_to(2)),
    "turned by XMP": stored(photograph(64, 48), xmp=b'<x tiff:Orientation="6"/>'),
    "CMYK": stored(photograph(64, 48, "CMYK")),
    "without its end": ORDINARY["4:2:0"][:-2],
    "cut": ORDINARY["4:2:0"][: len(ORDINARY["4:2:0"]) // 2],
    "cut, progressive": ORDINARY["progressive"][: len(ORDINARY["progressive"]) // 2],
    "cut in its header": ORDINARY["4:2:0"][:200],
    "a PNG": stored(photograph(64, 48), format="PNG"),
    "only the start": b"\xff\xd8\xff",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_others_are_read_by_pillow(kind: str, both: Callable[..., Any]) -> None:
    for view in (whole, VIEWS["crop"]):
        fast, plain, count = both(OTHERS[kind], 3, view)
        assert same(fast, plain)
        assert count == 0
    assert kind.startswith(("without", "cut", "only")) == isinstance(fast, str)


def test_grey_of_a_colour_image_is_pillows(both: Callable[..., Any]) -> None:
    fast, plain, count = both(ORDINARY["4:2:0"], 1)
    assert same(fast, plain)
    assert count == 0


@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "grey", "with restarts"])
def test_damaged_jpegs_end_alike(kind: str, both: Callable[..., Any]) -> None:
    """Of bits that change some are noticed by one decoder and not by the other; what comes out is the same."""
    data, draw = ORDINARY[kind], random.Random(kind)
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(draw.choice((1, 1, 5))):
            damaged[draw.randrange(2, len(data))] ^= 1 << draw.randrange(8)
        if draw.random() < 0.3:
            del damaged[draw.randrange(2, len(data)) :]
        fast, plain, _ = both(bytes(damaged), 3, VIEWS["crop"])
        assert same(fast, plain), damaged.hex()


def test_what_decodes_is_told_with_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jpeg.describe() == f"images     by {jpeg.decoders()}"
    assert jpeg.decoders().startswith("simplejpeg ")
    monkeypatch.setattr(jpeg, "library", lambda: None)
    assert jpeg.decoders().startswith("Pillow ")
    assert "simplejpeg, which is not installed, reads JPEGs faster" in jpeg.describe()
