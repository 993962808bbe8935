"""Processes that measure in turn: each waits for a line on its input, measures once and prints the result, as JSON. And
what a turn is of those that read photographs. Knows no torch."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import psutil

from benchmarks.harness import ROOT

BATCH = 64
ALONE, EPOCH, AHEAD = 2, 40, 8
"""Batches of a turn without workers; of an epoch, which is a turn with workers; and how many at its begin may have been
read ahead while others measured: they are not counted."""


class InTurn:
    """Such a process, on `cores` of this one's; ended with the block."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], python: str = sys.executable, cores: int = 1
    ) -> None:
        self._name = " ".join(arguments)
        self._process = subprocess.Popen(
            [python, *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self._process.pid, sorted(os.sched_getaffinity(0))[:cores])

    def measure(self) -> Any:
        """What it answers. Raises RuntimeError if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"measured":'):
                return json.loads(line)["measured"]
        raise RuntimeError(f"{self._name} ended with {self._process.wait()} before it had measured")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # its pipes too
            self._process.kill()


def answer_in_turn(measure: Callable[[], Any]) -> None:
    """The other side: measure once for each line of the input."""
    for _ in sys.stdin:
        print(json.dumps({"measured": measure()}), flush=True)


def turn(ready: Iterator[int], count: int, ahead: int = 0) -> tuple[float, float]:
    """Images/s of `count` batches after `ahead`, by the clock on the wall and by the processor time of this process and
    its children."""
    for _ in range(ahead):
        next(ready)
    wall, cpu = time.perf_counter(), processor_s()
    images = sum(next(ready) for _ in range(count))
    return images / (time.perf_counter() - wall), images / (processor_s() - cpu)


def processor_s() -> float:
    """Of this process and its living children, these in hundredths."""
    children = (child.cpu_times() for child in psutil.Process().children())
    return time.process_time() + sum(times.user + times.system for times in children)
