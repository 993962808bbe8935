"""Photographs as a folder of images: crops of those in scikit-image's and scikit-learn's packages, no two the same."""

import hashlib
import itertools
import random
import shutil
import sys
from pathlib import Path

from PIL import Image

from benchmarks import environments
from benchmarks.harness import ROOT

FOLDER = ROOT / "benchmarks" / "out" / "photographs"
COUNT = 2560
"""Forty batches of 64."""
SIZE, QUALITY = (500, 375), 85
"""The usual size of ImageNet's; 43 KB each at this quality."""
NAMES = (
    *("sklearn/datasets/images/china.jpg", "sklearn/datasets/images/flower.jpg"),
    *(
        f"skimage/data/{name}"
        for name in (
            *("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png"),
            *("hubble_deep_field.jpg", "ihc.png"),
        )
    ),
)
_SHARE = (0.7, 1.0)
"""Of the largest part of a photograph that has the ratio of SIZE, in each direction."""


def photographs() -> Path:
    """The folder, with a class a photograph in `train/`, and a few of each in `val/`; made if it is not there or was
    made by another code. Raises NotInstallable."""
    packages = environments.packages_of("photographs")
    stamp, wanted = FOLDER / "stamp", hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text(encoding="ascii") != wanted:
        print(f"making {COUNT:,} photographs in {FOLDER.relative_to(ROOT)} ...", file=sys.stderr, flush=True)
        shutil.rmtree(FOLDER, ignore_errors=True)
        make([packages / name for name in NAMES], FOLDER, COUNT)
        stamp.write_text(wanted, encoding="ascii")
    return FOLDER


def make(originals: list[Path], folder: Path, count: int) -> None:
    """`count` crops in turn of each, for training, and one of each for evaluation."""
    draws = random.Random(0)
    images = [(path.stem, Image.open(path).convert("RGB")) for path in originals]
    for number, (name, image) in zip(range(count + len(images)), itertools.cycle(images), strict=False):
        place = folder / ("train" if number < count else "val") / name
        place.mkdir(parents=True, exist_ok=True)
        crop(image, draws).save(place / f"{number:05d}.jpg", quality=QUALITY)


def crop(image: Image.Image, draws: random.Random) -> Image.Image:
    """A random part of it, mirrored or not, as SIZE."""
    ratio = SIZE[0] / SIZE[1]
    width = min(image.width, image.height * ratio) * draws.uniform(*_SHARE)
    height = width / ratio
    left, top = draws.uniform(0, image.width - width), draws.uniform(0, image.height - height)
    part = image.resize(SIZE, Image.Resampling.BICUBIC, (left, top, left + width, top + height))
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draws.random() < 0.5 else part
