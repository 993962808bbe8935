"""Every kind of image becomes the pixels that a viewer shows."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFile

from trainer.data import jpeg
from trainer.data.decode import MAX_PIXELS, DecodingError, read_pixels

Pixels = NDArray[np.uint8]


@pytest.fixture(autouse=True, params=["simplejpeg", "Pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Pillow":
        monkeypatch.setattr(jpeg, "library", lambda: None)
    else:
        pytest.importorskip("simplejpeg")


def stored(image: Image.Image, kind: str, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


def read(source: io.BytesIO | str, channels: int = 3) -> Pixels:
    """(H, W, C) or, in grey, (H, W)."""
    tensor = read_pixels(source, channels)
    assert tensor.shape[0] == channels
    pixels: Pixels = tensor.permute(1, 2, 0).numpy()
    return pixels if channels == 3 else pixels[:, :, 0]


def gradient(height: int = 24, width: int = 32) -> Pixels:
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([8 * x, 10 * y, 255 - 8 * x], axis=2).clip(0, 255).astype(np.uint8)


def png(width: int, height: int, depth: int, kind: int, rows: bytes, *more: tuple[bytes, bytes]) -> io.BytesIO:
    """A PNG by its specification, https://www.w3.org/TR/png-3; `rows` with a filter byte 0 before each."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    parts = [(b"IHDR", header), *more, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return io.BytesIO(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, data) for name, data in parts))


GREY, COLOUR, PALETTE, GREY_ALPHA, COLOUR_ALPHA = 0, 2, 3, 4, 6


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"exif": b"Exif\0\0broken"}], ids=str
)
def test_jpeg(options: dict[str, Any]) -> None:
    pixels = gradient()
    found = read(stored(Image.fromarray(pixels), "JPEG", quality=98, **options))
    # Smooth colours survive; two values of the quantisation at most.
    assert np.abs(found.astype(int) - pixels).mean() < 3
    assert found.shape == pixels.shape


def test_grey_jpeg_in_both_numbers_of_channels() -> None:
    pixels = np.full((8, 8), 77, np.uint8)
    file = stored(Image.fromarray(pixels), "JPEG", quality=100)
    assert (read(file) == 77).all()
    file.seek(0)
    assert (read(file, channels=1) == 77).all()


@pytest.mark.parametrize(
    ("ink", "colour"),
    [
        ((0, 255, 255, 0), (255, 0, 0)),
        ((255, 0, 0, 0), (0, 255, 255)),
        ((0, 0, 0, 0), (255, 255, 255)),
        ((0, 0, 0, 255), (0, 0, 0)),
        ((0, 0, 0, 128), (127, 127, 127)),
    ],
)
def test_cmyk_jpeg(ink: tuple[int, ...], colour: tuple[int, ...]) -> None:
    file = stored(Image.new("CMYK", (8, 8), ink), "JPEG", quality=100)
    assert b"Adobe" in file.getvalue()[:200]  # which says that the values are inverted, as Photoshop's are
    assert np.abs(read(file).astype(int) - colour).max() <= 1
    file.seek(0)
    grey = round(0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2])
    assert np.abs(read(file, channels=1).astype(int) - grey).max() <= 1


def test_png_of_8_bits_is_exact() -> None:
    pixels = gradient()
    assert (read(stored(Image.fromarray(pixels), "PNG")) == pixels).all()


def test_png_of_16_bits_is_scaled() -> None:
    values = (0, 255, 256, 32767, 32768, 65535)
    row = b"\0" + struct.pack(">6H", *values)
    expected = [round(value * 255 / 65535) for value in values]
    for channels in (1, 3):
        found = read(png(6, 1, 16, GREY, row), channels).reshape(6, -1)
        assert np.abs(found.astype(int) - np.array(expected)[:, None]).max() <= 1
        assert (found[0], found[5]) == (0, 255) if channels == 1 else (found[[0, 5]] == [[0], [255]]).all()
    colour = b"\0" + struct.pack(">6H", 65535, 0, 32768, 256, 511, 512)
    assert read(png(2, 1, 16, COLOUR, colour)).tolist() == [[[255, 0, 128], [1, 1, 2]]]


def test_tiff_of_16_bits_is_scaled() -> None:
    values = np.array([[0, 257, 65535]], np.uint16)
    assert read(stored(Image.fromarray(values), "TIFF"), channels=1).tolist() == [[0, 1, 255]]


def test_png_of_1_bit() -> None:
    assert read(png(8, 1, 1, GREY, b"\0\xa5"), channels=1).tolist() == [[255, 0, 255, 0, 0, 255, 0, 255]]


# Half of a colour of 200 over white: 200 * 128 / 255 + 255 * 127 / 255 = 227.4; over what is hidden: white.
HALF = 227


@pytest.mark.parametrize(
    "file",
    [
        png(3, 1, 8, GREY_ALPHA, bytes([0, 200, 255, 200, 128, 200, 0])),
        png(3, 1, 8, COLOUR_ALPHA, bytes([0, 200, 200, 200, 255, 200, 200, 200, 128, 200, 200, 200, 0])),
        png(3, 1, 8, PALETTE, bytes([0, 0, 1, 2]), (b"PLTE", bytes([200] * 9)), (b"tRNS", bytes([255, 128, 0]))),
        stored(Image.fromarray(np.array([[[200, 255], [200, 128], [200, 0]]], np.uint8), "LA"), "TIFF"),
    ],
    ids=["grey", "colour", "palette", "tiff"],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_transparency_is_on_white(file: io.BytesIO, channels: int) -> None:
    file.seek(0)
    found = read(file, channels).reshape(3, -1).astype(int)
    assert np.abs(found - np.array([200, HALF, 255])[:, None]).max() <= 1


@pytest.mark.parametrize(
    ("depth", "kind", "row", "key", "shown"),
    [
        (8, GREY, bytes([0, 10, 20]), struct.pack(">H", 20), [10, 255]),
        (8, COLOUR, bytes([0, 10, 10, 10, 20, 20, 20]), struct.pack(">3H", 20, 20, 20), [10, 255]),
        (16, GREY, b"\0" + struct.pack(">2H", 2570, 5140), struct.pack(">H", 5140), [10, 255]),
        (1, GREY, b"\0\x40", struct.pack(">H", 1), [0, 255]),
    ],
    ids=["grey", "colour", "16 bits", "1 bit"],
)
def test_a_transparent_colour_is_white(depth: int, kind: int, row: bytes, key: bytes, shown: list[int]) -> None:
    assert read(png(2, 1, depth, kind, row, (b"tRNS", key)))[0, :, 0].tolist() == shown


def test_webp() -> None:
    pixels = gradient()
    assert (read(stored(Image.fromarray(pixels), "WEBP", lossless=True)) == pixels).all()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF"])
def test_of_several_frames_it_is_the_first(kind: str) -> None:
    frames = [Image.new("RGB", (4, 3), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    found = read(stored(frames[0], kind, save_all=True, append_images=frames[1:], **options))
    assert (found == (255, 0, 0)).all()


# How a viewer makes each orientation upright (EXIF 2.3, tag 0x0112), undone: what is stored.
ORIENTED: dict[int, Callable[[Pixels], Pixels]] = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.transpose(1, 0, 2),
    6: lambda upright: np.rot90(upright, 1),
    7: lambda upright: upright[::-1, ::-1].transpose(1, 0, 2),
    8: lambda upright: np.rot90(upright, -1),
}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
@pytest.mark.parametrize("orientation", ORIENTED)
def test_images_are_upright(kind: str, orientation: int) -> None:
    upright = np.zeros((16, 32, 3), np.uint8)  # whole blocks of a JPEG
    upright[:8, :16], upright[:8, 16:], upright[8:, :16] = (250, 0, 0), (0, 250, 0), (0, 0, 250)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(ORIENTED[orientation](upright)))
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
    found = read(stored(image, kind, exif=exif, **options))
    assert found.shape == upright.shape
    assert np.abs(found.astype(int) - upright).max() <= 3


@pytest.mark.parametrize("size", [(1, 1), (1, 20_000), (20_000, 1), (20_000, 20)], ids=str)
def test_any_shape(size: tuple[int, int]) -> None:
    file = stored(Image.new("RGB", size, (1, 2, 3)), "PNG")
    assert read(file).shape == (size[1], size[0], 3)


def test_an_image_too_large_for_memory_is_told_by_its_header() -> None:
    with pytest.raises(DecodingError, match=r"it has 20001 x 20000 pixels, more than 400,000,000"):
        read_pixels(png(20_001, 20_000, 8, GREY, b""), 3)
    assert MAX_PIXELS == 400_000_000
    # Beyond what Pillow warns of, 89 million, and still read.
    assert read(stored(Image.new("1", (10_000, 10_000)), "PNG"), channels=1).shape == (10_000, 10_000)


def jpeg_bytes() -> bytes:
    return stored(Image.fromarray(gradient(64, 64)), "JPEG").getvalue()


def png_bytes() -> bytes:
    return stored(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)), "PNG").getvalue()


BROKEN = {
    "empty": (b"", "it is empty"),
    "text": (b"hello, I am a picture\n" * 10, "it is no image"),
    "half a JPEG": (jpeg_bytes()[: len(jpeg_bytes()) // 2], "(?i)truncated"),
    "half a PNG": (png_bytes()[: len(png_bytes()) // 2], "(?i)truncated"),
    "a PNG with a bit changed": (png_bytes()[:500] + bytes([png_bytes()[500] ^ 1]) + png_bytes()[501:], "."),
    "a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) print\n", "it is no image"),
    "floats": (stored(Image.new("F", (2, 2)), "TIFF").getvalue(), "its pixels are floating-point numbers"),
    "32 bits": (stored(Image.new("I", (2, 2)), "TIFF").getvalue(), "its pixels are 32-bit numbers"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_an_error_that_says_why(name: str, tmp_path: Path) -> None:
    content, told = BROKEN[name]
    limit = Image.MAX_IMAGE_PIXELS
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    for source in (str(path), io.BytesIO(content)):
        with pytest.raises(DecodingError, match=told) as error:
            read_pixels(source, 3)
        assert "\n" not in str(error.value)
        assert "broken.png" not in str(error.value)  # who calls says it, in full
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    assert limit == Image.MAX_IMAGE_PIXELS


def test_a_file_that_is_not_there_is_no_bad_image(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_pixels(str(tmp_path / "gone.png"), 3)
