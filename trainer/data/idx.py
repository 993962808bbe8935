"""IDX, the format of MNIST's files: two zeros, the type, the number of axes, their lengths as big-endian uint32, data.

Read here and not by torchvision, whose import alone takes longer than everything else before the first step (1.5 s).
"""

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

UNSIGNED_BYTE = 8


def read_idx(path: Path) -> Tensor:
    """The array in `path`, uint8, of whatever shape the file says. Raises ValueError if it is none, OSError."""
    content = bytearray(path.stat().st_size)  # what torch takes without a copy
    with path.open("rb") as file:
        file.readinto(content)
    try:
        zeros, kind, num_axes = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{num_axes}I", content, 4)
    except struct.error:
        raise ValueError(f"{path} is no IDX file: it ends in its header") from None
    start, size = 4 + 4 * num_axes, math.prod(shape)
    if (zeros, kind) != (0, UNSIGNED_BYTE):
        raise ValueError(f"{path} is no IDX file of bytes: it begins with {bytes(content[:4]).hex()}")
    if len(content) != start + size or not size:
        raise ValueError(f"{path} has {len(content):,} bytes, not a header and {size:,} as it says")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)
