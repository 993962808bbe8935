"""File systems of a test's own: mounted where only the process that asks and its children see them."""

import ctypes
import os
from pathlib import Path

import pytest

from tests.dist.harness import exit_statuses, fork

_NEW_NAMESPACE = 0x20000  # CLONE_NEWNS
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 1 << 14, 1 << 18


def mount_private(place: Path, *, num_bytes: int | None = None, read_only: bool = False) -> None:
    """In this (forked) process: a memory file system of `num_bytes` at `place`, or `place` itself made read-only.
    It is gone with the process. Raises PermissionError where that is not allowed."""
    if not hasattr(ctypes.CDLL(None), "unshare"):
        raise PermissionError("no mount namespaces on this system")
    _call("unshare", _NEW_NAMESPACE)
    _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)
    if num_bytes is not None:
        _call("mount", b"none", os.fsencode(place), b"tmpfs", 0, f"size={num_bytes}".encode())
    if read_only:
        _call("mount", os.fsencode(place), os.fsencode(place), None, _BIND, None)
        _call("mount", None, os.fsencode(place), None, _BIND | _REMOUNT | _READ_ONLY, None)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _can_mount() -> bool:
    def body() -> int:
        try:
            mount_private(Path("/"))
        except OSError:
            return 1
        return 0

    return exit_statuses([fork(body)]) == [0]


def needs_mounts() -> None:
    """Skip the test where this user may mount nothing."""
    if not _can_mount():
        pytest.skip("mounting needs root, or user namespaces with mounts")
