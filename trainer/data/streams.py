"""What a random number is for. Each use has a stream of its own, so that switching one kind of change on leaves the
others as they were."""

from enum import IntEnum


class Stream(IntEnum):
    """In the key of a draw, after the seed and the epoch. A number, once given, stays: it makes runs what they were."""

    SHIFT_Y = 0
    SHIFT_X = 1
    FLIP = 2
    CUTOUT_Y = 3
    CUTOUT_X = 4
    CROP = 5
    MIX = 6
    POLICY = 7
    SAMPLING = 8
    ERASING = 9
    NOISE = 10
    SIZE = 11
    INTERPOLATION = 12
