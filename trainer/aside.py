"""Files that are whole or absent: made in a folder beside their place, by one process at a time. No torch."""

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, nobody else is, who asks for the same lock."""
    with open(path, "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def aside(root: Path, prefix: str = ".tmp-") -> Iterator[Path]:
    """A folder beside the final one. Those of a process that was killed are removed:
    the lock says that nobody else is at work."""
    for leftover in root.glob(f"{prefix}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
