"""IDX files, byte by byte as http://yann.lecun.com/exdb/mnist describes them."""

from pathlib import Path

import pytest
import torch

from trainer.data.idx import read_idx

# Two images of 2 x 3 pixels.
IMAGES = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3, *range(244, 256)])


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "images-idx3-ubyte"
    path.write_bytes(content)
    return path


def test_the_header_gives_the_shape(tmp_path: Path) -> None:
    assert read_idx(written(tmp_path, IMAGES)).equal(torch.arange(244, 256, dtype=torch.uint8).view(2, 2, 3))
    assert read_idx(written(tmp_path, bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))).tolist() == [7, 2, 1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        IMAGES[:9],
        IMAGES[:-1],
        IMAGES + b"\0",
        b"\0\0\x0d" + IMAGES[3:],
        b"\x1f\x8b" + IMAGES[2:],
        bytes([0, 0, 8, 3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 3]),
    ],
    ids=["empty", "header cut", "data cut", "too long", "floats", "gzip", "no images"],
)
def test_anything_else_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match=r"images-idx3-ubyte (is no IDX file|has \d+ bytes)"):
        read_idx(written(tmp_path, content))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_idx(tmp_path / "none")
