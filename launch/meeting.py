"""A fresh folder for the files through which the ranks of one node meet; what killed launchers left is removed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_LOCK = "lock"


@contextlib.contextmanager
def meeting_folder() -> Iterator[Path]:
    """In the system's temporary folder, for as long as this lasts."""
    temporary = Path(tempfile.gettempdir())
    for left in temporary.glob("lockstep-*-*"):
        _remove_if_left(left)
    path, lock = _make_locked()
    with lock:
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _make_locked() -> tuple[Path, TextIO]:
    """Another launcher may find the folder before it is locked, and remove it: then one more is made."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"lockstep-{os.getpid()}-"))
        lock = (path / _LOCK).open("w", encoding="ascii")
        with contextlib.suppress(OSError):  # a file system without locks: nobody will get this one either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / _LOCK).exists():
            return path, lock
        lock.close()


def _remove_if_left(path: Path) -> None:
    """A pid would not tell: the temporary folder may be shared by containers or nodes, and each counts its own."""
    with contextlib.suppress(OSError), (path / _LOCK).open("r+", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
