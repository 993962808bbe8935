"""A rank's beat: a few numbers in `attempts/K/beat-rankR`, memory that the rank changes at each turn and the launcher
reads. Writing them costs less than a microsecond and wakes nobody."""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

# What a rank is doing, in the order in which it comes by at one number of completed updates.
STARTING, BOUNDARY, EVALUATION, SAVING, DATA, COMPUTE, WAITING, UPDATE, FINISHING = range(9)
"""BOUNDARY: between two steps. COMPUTE: forward and backward pass. WAITING: its own gradients are there, those of the
others are not."""

LAYOUT = struct.Struct("<qqddqd")


class Beat(NamedTuple):
    """The fields in the order in which they lie in the file. Times are seconds since the epoch."""

    phase: int
    step: int
    """Completed updates."""
    time: float
    """Of this beat; differs from one to the next."""
    median_s: float
    """Of the last steps; 0 until there is one."""
    first_step: int
    """Where this attempt went on from; -1 until it trains."""
    started: float
    """When the launcher began with this attempt."""


def open_beat(path: Path) -> mmap.mmap:
    """Make the file and return its memory; where a file cannot be shared memory there is none, and nobody watches."""
    path.write_bytes(
        bytes(LAYOUT.size)
    )  # really written: memory without space on the disk would end the rank by SIGBUS
    try:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), LAYOUT.size)
    except OSError:
        path.unlink()
        return mmap.mmap(-1, LAYOUT.size)


def read_beat(path: Path) -> Beat | None:
    """The last beat; None if there is none yet."""
    try:
        beat = Beat(*LAYOUT.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return None
    return beat if beat.time > 0 and STARTING <= beat.phase <= FINISHING else None


def is_step(phase: int) -> bool:
    return DATA <= phase <= UPDATE
