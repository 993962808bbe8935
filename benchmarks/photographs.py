"""From files to normalised floats: the loader's path of photographs, against torchvision's on one core and timm's on
two. JPEGs of 500 x 375 become 224 x 224, by a random crop, antialiased, and mirrored or not, in batches of 64."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from benchmarks import environments
from benchmarks.accuracy import ONE_THREAD
from benchmarks.harness import Row, Target, in_turn, not_measured, ratio_row
from benchmarks.jpegs import photographs
from benchmarks.turns import InTurn
from launch.rank_environment import KEEP_MEMORY
from trainer.data import jpeg
from trainer.data.crops import random_view
from trainer.data.decode import read_pixels
from trainer.data.order import key_of

ROUNDS = 30
LOADER_ROUNDS = 10
PIXELS_OF = 200
LOCKSTEP, TORCHVISION, TIMM, PILLOW = "Lockstep", "torchvision", "timm", "Lockstep without simplejpeg"
UNIT, CPU_UNIT = "images/s", "images/s of CPU time"
SIDE, SCALE, RATIO = 224, (0.08, 1.0), (3 / 4, 4 / 3)
OURS = ("-m", "benchmarks.photograph_batches")


class Rate(NamedTuple):
    """Images/s by the clock on the wall, and by the processor time of all processes."""

    wall: float
    cpu: float


def measure(rounds: int | None = None) -> list[Row]:
    """One core, then two; and what the pixels are."""
    try:
        root = photographs()
    except environments.NotInstallable as reason:
        return [not_measured("photographs/core", str(reason))]
    return [*on_one_core(root, rounds or ROUNDS), *on_two_cores(root, rounds or LOADER_ROUNDS), pixels_row(root)]


def on_one_core(root: Path, rounds: int) -> list[Row]:
    """Batches read by the process itself, with one thread."""
    ours = [*OURS, str(root), "--num-workers", "0"]
    with contextlib.ExitStack() as stack:
        start = partial(_start, stack, cores=1)
        variants = {LOCKSTEP: start(ours, KEEP_MEMORY)}
        if jpeg.library() is not None:
            variants[PILLOW] = start([*ours, "--without-simplejpeg"], KEEP_MEMORY)
        variants[TORCHVISION] = start(["-m", "benchmarks.peers.torchvision_photographs", str(root)], {})
        in_turn(variants, 2)  # the caches
        measured = in_turn(variants, rounds)
    rows = [
        ratio_row("photographs/core", _wall(measured), LOCKSTEP, TORCHVISION, UNIT, Target(">=", 2.2)),
        ratio_row("photographs/core-cpu", _cpu(measured), LOCKSTEP, TORCHVISION, CPU_UNIT),
    ]
    if PILLOW in measured:
        rows.append(ratio_row("photographs/core-pillow", _cpu(measured), PILLOW, TORCHVISION, CPU_UNIT))
    return rows


def on_two_cores(root: Path, rounds: int) -> list[Row]:
    """Two loader workers, and the process that they serve, share two cores."""
    try:
        python = environments.python_for("timm")
    except environments.NotInstallable as reason:
        return [not_measured("photographs/loader", str(reason))]
    with contextlib.ExitStack() as stack:
        start = partial(_start, stack, cores=2)
        variants = {
            LOCKSTEP: start([*OURS, str(root), "--num-workers", "2"], KEEP_MEMORY),
            TIMM: start(["-m", "benchmarks.peers.timm_photographs", str(root)], {}, python=python),
        }
        in_turn(variants, 1)
        measured = in_turn(variants, rounds)
    return [
        ratio_row("photographs/loader", _wall(measured), LOCKSTEP, TIMM, UNIT, Target(">=", 3)),
        ratio_row("photographs/loader-cpu", _cpu(measured), LOCKSTEP, TIMM, CPU_UNIT),
    ]


def _wall(measured: Mapping[str, list[Rate]]) -> dict[str, list[float]]:
    return {name: [rate.wall for rate in rates] for name, rates in measured.items()}


def _cpu(measured: Mapping[str, list[Rate]]) -> dict[str, list[float]]:
    return {name: [rate.cpu for rate in rates] for name, rates in measured.items()}


def _start(
    stack: contextlib.ExitStack, arguments: list[str], environment: dict[str, str], **options: Any
) -> Callable[[], Rate]:
    process = stack.enter_context(InTurn(arguments, ONE_THREAD | environment, **options))
    return lambda: Rate(*process.measure())


def pixels_row(root: Path) -> Row:
    """How far our pixels are from Pillow's: decoded, cut and resized, antialiased."""
    means, largest = zip(*differences(root), strict=True)
    mean, limit = statistics.fmean(means), Target("<=", 0.1)
    return Row(
        key="photographs/pixels",
        subject=f"{LOCKSTEP}: {len(means)} crops",
        versus="Pillow: decoded, cut, resized, antialiased",
        result=f"off by {mean:.3f} of 255 levels in the mean, {max(largest)} at most",
        value=mean,
        target=f"{limit.show()} levels",
        is_met=limit.is_met_by(mean),
        details={"mean": list(means), "largest": list(largest)},
    )


def differences(root: Path) -> Iterator[tuple[float, int]]:
    """Mean and largest difference, in levels, of each of some crops."""
    for index, path in enumerate(sorted(root.glob("train/*/*.jpg"))[:: 2560 // PIXELS_OF][:PIXELS_OF]):
        view = random_view(key_of(0, index), SIDE, SCALE, RATIO)
        with Image.open(path) as image:
            wanted = view(*image.size)
            assert wanted is not None
            square = image.crop(tuple(map(int, wanted.box))).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            theirs = np.asarray(square).astype(int)
        ours = read_pixels(str(path), 3, view).permute(1, 2, 0).numpy().astype(int)
        difference = np.abs(ours - theirs)
        yield float(difference.mean()), int(difference.max())
