"""Where the ranks are: SIGQUIT makes each write the Python stacks of all its threads to its log (faulthandler)."""

import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from configs.run_dir import AttemptDir
from launch.processes import Process, descendants, send

DUMP_S = 5.0
"""How long to wait for the stacks; they take some milliseconds where the machine is not busy."""

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+|\?\?\?) in (.+)$', re.MULTILINE)
_OUTERMOST = re.compile(r"(?: in <module>| in _run_module_as_main|^  \.\.\.)\n?\Z", re.MULTILINE)
_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
_LOADER, _READS = "/torch/utils/data/dataloader.py", "/torch/utils/data/_utils/fetch.py"
"""Frames of a rank that waits for its loader workers, and of a worker that is reading for it."""
# Frames of torch in which a rank waits for the others: a collective, or the GPU that is in one.
_WAITS = re.compile(r"/torch/(distributed|cuda)/")


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: str
    function: str

    def shown(self, cwd: Path) -> str:
        path = Path(self.file)
        return f"{path.relative_to(cwd) if path.is_relative_to(cwd) else path}:{self.line} {self.function}"


Stack = list[Frame]
"""Innermost frame first."""


def ask_for_stacks(attempt: AttemptDir, ranks: Mapping[int, Process]) -> dict[int, Stack]:
    """The main threads' stacks, of the ranks that answer in time; where one waits for a loader worker, the worker's."""
    stacks = _dumped(attempt, ranks)
    return stacks | {
        rank: reading
        for rank, stack in stacks.items()
        if _is_in(_LOADER, stack) and (reading := _reading(attempt, rank, ranks[rank]))
    }


def _reading(attempt: AttemptDir, rank: int, process: Process) -> Stack | None:
    """Where the rank's first busy loader worker is. Workers write to the rank's log: one after the other."""
    for worker in sorted(descendants(process), key=lambda worker: worker.pid):
        stack = _dumped(attempt, {rank: worker}).get(rank, [])
        if _is_in(_READS, stack):
            return stack
    return None


def _is_in(file: str, stack: Stack) -> bool:
    return any(frame.file.replace(os.sep, "/").endswith(file) for frame in stack)


def is_of_worker(stack: Stack) -> bool:
    """Whether it is a loader worker's, not the rank's own."""
    return _is_in(_READS, stack)


def _dumped(attempt: AttemptDir, ranks: Mapping[int, Process]) -> dict[int, Stack]:
    """What these processes write to the logs of their ranks when they are asked."""
    before = {rank: _size(attempt.rank_log(rank)) for rank in ranks}
    for process in ranks.values():
        send(process, signal.SIGQUIT)
    deadline = time.monotonic() + DUMP_S
    while True:
        dumps = {rank: _since(attempt.rank_log(rank), before[rank]) for rank in ranks}
        if all(map(is_complete, dumps.values())) or time.monotonic() > deadline:
            return {rank: stack for rank, dump in dumps.items() if (stack := main_stack(dump))}
        time.sleep(0.02)


def main_stack(dump: str) -> Stack:
    """Of the main thread, which faulthandler writes last; empty if nothing was written."""
    starts = [match.end() for match in _THREAD.finditer(dump)]
    return [Frame(*found) for found in _FRAME.findall(dump[starts[-1] :])] if starts else []


def is_complete(dump: str) -> bool:
    """Whether the last line is a thread's outermost frame, and there is no further thread that it could belong to.

    Only the main thread begins in a module."""
    return bool(_THREAD.search(dump) and _OUTERMOST.search(dump))


def own_frame(stack: Stack) -> Frame:
    """The innermost frame outside installed packages; the innermost one if all are inside."""
    ours = (f for f in stack if not f.file.startswith("<") and not any(place in f.file for place in _INSTALLED))
    return next(ours, stack[0])


def waits_for_others(stack: Stack) -> bool:
    return bool(stack) and _WAITS.search(stack[0].file.replace(os.sep, "/")) is not None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _since(path: Path, offset: int) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode("utf-8", errors="replace")
