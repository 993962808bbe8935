"""Folders of small images, made by the tests."""

from pathlib import Path

import numpy as np
from PIL import Image

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {"a": (250, 10, 10), "b": (10, 250, 10), "c": (10, 10, 250), "zebra": (128, 128, 128)}


def plain(path: Path, colour: Colour, size: tuple[int, int] = (8, 8)) -> None:
    """An image of one colour; its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def make(root: Path, **counts: int) -> Path:
    """`train__a=4` makes root/train/a/00.png to 03.png in the colour of `a`, each slightly darker than the last."""
    for place, count in counts.items():
        name = place.rpartition("__")[2]
        for number in range(count):
            red, green, blue = COLOURS[name]
            colour = max(0, red - number), max(0, green - number), max(0, blue - number)
            plain(root / place.replace("__", "/") / f"{number:02d}.png", colour)
    return root


def noisy(root: Path, **counts: int) -> Path:
    """As make(), of images of noise, each of another size."""
    for place, count in counts.items():
        (root / place.replace("__", "/")).mkdir(parents=True)
        for number in range(count):
            random = np.random.default_rng(number)
            pixels = random.integers(0, 256, (20 + number, 30 - number % 12, 3), np.uint8)
            Image.fromarray(pixels).save(root / place.replace("__", "/") / f"{number:02d}.png")
    return root
