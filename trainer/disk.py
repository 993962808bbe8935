"""Writing that is on the disk when it returns. What the disk refuses becomes one sentence with the path and the fix."""

import contextlib
import hashlib
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from configs.errors import EnvironmentProblem

_FIXES = {
    "No space left on device": "free some space",
    "Disk quota exceeded": "free some space or ask for a larger quota",
    "File too large": "raise `ulimit -f`",
    "Permission denied": "make the folder writable",
    "Operation not permitted": "make the folder writable",
    "Read-only file system": "make the folder writable",
    "No such file or directory": "look for what removed or unmounted it",
}


@contextlib.contextmanager
def in_one_sentence(doing: str, path: Path) -> Iterator[None]:
    """Raise EnvironmentProblem where the system refuses what is done inside: "cannot `doing` `path`: why"."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors wraps an OSError in its own class
        if isinstance(error, SafetensorError) and "I/O error" not in str(error) and "Io" not in str(error):
            raise
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        fix = next((fix for sign, fix in _FIXES.items() if sign in reason), "look at the disk (dmesg)")
        raise EnvironmentProblem(
            f"cannot {doing} {path}: {reason} ({free_bytes(path):,} bytes free); the last checkpoint stands; {fix}"
        ) from error


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, on the disk when this returns. The tensors are contiguous and share no memory. Other
    threads go on meanwhile: safetensors and fsync let go of Python's lock."""
    with in_one_sentence("write", path):
        save_file(tensors, path)
        sync(path)


def write_text(path: Path, text: str) -> None:
    """A text file, on the disk when this returns."""
    with in_one_sentence("write", path):
        path.write_text(text, encoding="utf-8")
        sync(path)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Remove whatever it is: a folder with all in it, a file, a link (never what it points at)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def free_bytes(path: Path) -> int:
    """Free space for this user where `path` is or will be."""
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.is_dir())).free


def check_space(folder: Path, num_bytes: int, largest_file: int, why: str) -> None:
    """Raise EnvironmentProblem unless `num_bytes` more fit into `folder`, and a file of `largest_file` may be made."""
    free = free_bytes(folder)
    if free < num_bytes:
        raise EnvironmentProblem(
            f"{folder} has {free:,} bytes free and needs {num_bytes:,}: {why}; "
            "free some space, choose another --runs-dir, or lower checkpoint.keep"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < largest_file:
        raise EnvironmentProblem(
            f"`ulimit -f` lets this process write files of {limit:,} bytes and the largest of a checkpoint in {folder} "
            f"has {largest_file:,}; raise `ulimit -f`"
        )
