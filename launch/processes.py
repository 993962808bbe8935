"""Which processes live and who descends from whom. None is ended by name, no reused pid is taken for the old one."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One process, for good: a pid and when it was started."""

    pid: int
    started: str


@dataclass(frozen=True)
class _Entry:
    process: Process
    parent: int
    state: str
    """As ps shows it: Z for one that is only waiting to be collected, T for one that was stopped."""

    @property
    def is_zombie(self) -> bool:
        return self.state in ("Z", "X")


def find_process(pid: int) -> Process | None:
    """The process that has this pid now; None if there is none or it is only waiting to be collected."""
    entry = _entry(pid)
    return entry.process if entry and not entry.is_zombie else None


def is_alive(process: Process) -> bool:
    return find_process(process.pid) == process


def is_stopped(process: Process) -> bool:
    """Whether it was stopped by a signal and waits for SIGCONT."""
    entry = _entry(process.pid)
    return entry is not None and entry.process == process and entry.state == "T"


def descendants(process: Process) -> set[Process]:
    """All that come from `process`, without itself."""
    return _descendants({process.pid}) if is_alive(process) else set()


def kill_tree(roots: Iterable[Process], *, wait_s: float = 2.0) -> None:
    """SIGKILL these processes and all their descendants, until none is left or `wait_s` is over."""
    known = set(roots)
    deadline = time.monotonic() + wait_s
    while True:
        known |= _descendants({process.pid for process in known if is_alive(process)})
        living = [process for process in known if is_alive(process)]
        if not living or time.monotonic() > deadline:
            return
        for process in living:
            send(process, signal.SIGKILL)
        time.sleep(0.01)  # a killed process needs a moment to go; one that forked meanwhile is caught in the next round


def send(process: Process, number: int) -> None:
    """Signal `process` if it still lives."""
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def pending_signals(process: Process) -> set[int]:
    """Signals that `process` was sent and blocks; none where there is no /proc to tell."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = _PROC.joinpath(str(process.pid), "status").read_text(encoding="ascii", errors="replace").splitlines()
        mask = int(next(line for line in lines if line.startswith("ShdPnd:")).split()[1], 16)
        return {number for number in range(1, 65) if mask >> (number - 1) & 1} if is_alive(process) else set()
    return set()


def dies_with_parent() -> Callable[[], None] | None:
    """A preexec_fn that has the kernel SIGKILL the child when the thread that starts it ends; None on macOS.

    Otherwise a SIGKILL of the launcher would leave the ranks running. There they ask for their parent themselves.
    """
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)

    return in_child


def _descendants(pids: set[int]) -> set[Process]:
    children: dict[int, list[_Entry]] = {}
    for entry in _table():
        children.setdefault(entry.parent, []).append(entry)
    found: set[Process] = set()
    waiting = list(pids)
    while waiting:
        for entry in children.pop(waiting.pop(), []):
            found.add(entry.process)
            waiting.append(entry.process.pid)
    return found


def _table() -> list[_Entry]:
    if not _PROC.joinpath("self/stat").exists():
        return _ps([])
    entries = (_entry(int(path.name)) for path in _PROC.iterdir() if path.name.isdigit())
    return [entry for entry in entries if entry]


def _entry(pid: int) -> _Entry | None:
    if not _PROC.joinpath("self/stat").exists():
        return next(iter(_ps(["-p", str(pid)])), None)
    try:
        text = _PROC.joinpath(str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything; fields after it: state, parent, ..., start time (the 22nd of all).
    fields = text.rpartition(")")[2].split()
    return _Entry(Process(pid, fields[19]), int(fields[1]), fields[0])


def _ps(selection: list[str]) -> list[_Entry]:
    """The same without /proc (macOS)."""
    command = ["ps", *(selection or ["-A"]), "-o", "pid=,ppid=,stat=,lstart="]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    rows = [line.split(maxsplit=3) for line in lines]
    return [_Entry(Process(int(row[0]), row[3]), int(row[1]), row[2][0]) for row in rows if len(row) == 4]
