"""Faults on purpose: what a configuration's `faults` asks for, at one update of one rank. See docs/faults.md."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from configs.sections import FaultConfig
from trainer.checkpoint import step_folders

Pieces = list[tuple[Tensor, Tensor]]


class Faults:
    """The faults of one rank in the start of the run with this number. Each happens once."""

    def __init__(
        self,
        faults: tuple[FaultConfig, ...],
        rank: int,
        attempt: int,
        checkpoints: Path,
        land: Callable[[], None] = lambda: None,
    ) -> None:
        """`land` waits for the checkpoint that is being written, so that a fault leaves the same one each time."""
        self._left = [fault for fault in faults if fault.rank == rank and fault.attempt in (None, attempt)]
        self._checkpoints, self._land = checkpoints, land

    def strike(self, step: int, pieces: Pieces) -> Pieces:
        """Let the first fault that is left for `step` happen, before the forward pass. Returns what to train on."""
        fault = next((fault for fault in self._left if fault.step == step), None)
        if fault is None:
            return pieces
        self._left.remove(fault)
        self._land()
        print(f"fault: {fault.kind} at step {step}", flush=True)
        if fault.kind == "nan":
            return _nan(pieces)
        _FAULTS[fault.kind](fault, self._checkpoints)
        return pieces


def unreached(faults: tuple[FaultConfig, ...], attempt: int, steps: range) -> list[str]:
    """A note on each fault of any rank that this start, which made the updates after `steps`, did not come by."""
    return [
        f"note: faults: {fault.kind} of rank {fault.rank} at step {fault.step} did not happen: "
        f"this start went from step {steps.start} to {steps.stop}"
        for fault in faults
        if fault.attempt in (None, attempt) and fault.step not in steps
    ]


def _nan(pieces: Pieces) -> Pieces:
    """The same batch with images that are not numbers."""
    return [(torch.full_like(images, torch.nan, dtype=torch.float32), labels) for images, labels in pieces]


def _signal(number: int) -> Callable[[FaultConfig, Path], None]:
    return lambda _fault, _checkpoints: os.kill(os.getpid(), number)


def _exit(_fault: FaultConfig, _checkpoints: Path) -> None:
    os._exit(7)


def _raise(fault: FaultConfig, _checkpoints: Path) -> None:
    raise RuntimeError(f"injected on rank {fault.rank} at step {fault.step}")


def _out_of_memory(fault: FaultConfig, _checkpoints: Path) -> None:
    raise torch.OutOfMemoryError(f"out of memory, injected on rank {fault.rank} at step {fault.step}")


def _hang(_fault: FaultConfig, _checkpoints: Path) -> None:
    while True:
        time.sleep(3600)


def _slow(fault: FaultConfig, _checkpoints: Path) -> None:
    time.sleep(fault.seconds)


def _corrupt_checkpoint(_fault: FaultConfig, checkpoints: Path) -> None:
    """Flip one byte in the middle of the newest checkpoint's largest file, then die: the next start must notice."""
    newest = next(reversed(step_folders(checkpoints)), None)
    if newest is None:
        raise RuntimeError("corrupt_checkpoint was injected before there was one")
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_in_save(_fault: FaultConfig, checkpoints: Path) -> None:
    """Die when the next checkpoint has its first file written and is about to make sure of it. Linux only."""
    sync = os.fsync

    def fatal(descriptor: int) -> None:
        if str(checkpoints.resolve()) in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    os.fsync = fatal  # type: ignore[assignment]  # its argument may be a file too; here it never is


_FAULTS: dict[str, Callable[[FaultConfig, Path], None]] = {
    "sigkill": _signal(signal.SIGKILL),
    "sigkill_in_save": _kill_in_save,
    "sigterm": _signal(signal.SIGTERM),
    "sigstop": _signal(signal.SIGSTOP),
    "exit": _exit,
    "raise": _raise,
    "oom": _out_of_memory,
    "hang": _hang,
    "slow": _slow,
    "corrupt_checkpoint": _corrupt_checkpoint,
}
