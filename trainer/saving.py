"""Saving without stopping: the training thread copies, one writer thread of each rank writes; see
docs/decisions/0008-saving-in-a-thread.md.

The writers run no collective, for DDP's go on meanwhile. They meet in the folder that is being written: each rank puts
its files there and then, as JSON, their sizes and hashes; rank 0 waits for all of these and publishes.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from configs.contract import write_atomically
from configs.errors import EnvironmentProblem
from configs.run_dir import step_name
from configs.sections import LaunchConfig
from trainer.checkpoint import ASIDE, FORMAT, PART, STATE, Facts, Snapshot, Tensors, publish, rank_file, tidy
from trainer.disk import in_one_sentence, remove, sha256, sync, write_tensors, write_text
from trainer.memory import told_if_out_of_memory
from trainer.peers import PeerError
from trainer.runtime import RunContext
from trainer.stop import grace_note

THREAD = "checkpoint"
"""Name of the writer thread."""
PEER_PATIENCE_S = 3.0
"""After an error: how long rank 0 waits for the others' parts, which are smaller than its own, once that is written."""
_POLL_S = 0.01


class MissingPart(EnvironmentProblem):
    """Another rank did not get its files to the disk in time."""


@dataclass
class _Flight:
    """One save on its way to the disk. The writer sets what the training thread reads."""

    snapshot: Snapshot
    """On the host; of what is shared, rank 0's."""
    final: Path
    is_best: bool
    before: Callable[[], None]
    copied: torch.cuda.Event | None
    """When a GPU has done the copies; None where they are done."""
    began: float = field(default_factory=time.monotonic)
    thread: threading.Thread = field(init=False)
    written: threading.Event = field(default_factory=threading.Event)
    """This rank's own files are on the disk, or it failed."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """No more waiting for the other ranks' parts."""
    is_published: bool = False
    error: Exception | None = None
    is_told: bool = False
    """Why it failed is raised already."""

    @property
    def aside(self) -> Path:
        return self.final.with_name(ASIDE + self.final.name)

    def wait_written(self) -> None:
        """Until this rank's files are on the disk. Raises what went wrong."""
        self.written.wait()
        self.check()

    def wait_over(self) -> None:
        """Until the writer has nothing more to do. Raises what went wrong."""
        self.thread.join()
        self.check()

    def check(self) -> None:
        if self.error is not None:
            self.is_told = True
            raise self.error


class Saver:
    """This rank's part in saving.

    Memory: from the first save to the end rank 0 keeps a copy of all that is saved (weights, optimizer, EMA) on the
    host, pinned where the device is a GPU; the other ranks only one of what is their own.
    """

    def __init__(
        self, context: RunContext, folder: Path, keep: int, limits: LaunchConfig, announce: Callable[[str], None]
    ) -> None:
        """`announce` is called by rank 0's writer thread with what the user is to read."""
        self._context, self._folder, self._keep = context, folder, keep
        self._limits, self._announce = limits, announce
        self._is_slow = False
        self._buffers: dict[str, Tensors] = {}
        self._flight: _Flight | None = None

    @property
    def has_failed(self) -> bool:
        """Whether this rank's writer failed; settle() will tell all."""
        return self._flight is not None and self._flight.error is not None

    def save(self, snapshot: Snapshot, *, is_best: bool, before: Callable[[], None]) -> None:
        """Copy what is to be saved and return; it is written meanwhile. Called by all ranks, after settle().
        Rank 0's writer calls `before` just before it publishes."""
        assert self._flight is None, "the save before is not settled"
        final = self._folder / step_name(snapshot.step)
        with told_if_out_of_memory("for the copy of a checkpoint", "it takes host memory for all that is saved"):
            copy = self._copied(snapshot)
        flight = _Flight(copy, final, is_best, before, _mark())
        flight.thread = threading.Thread(target=self._write, args=(flight,), name=THREAD, daemon=True)
        flight.thread.start()
        self._flight = flight

    def settle(self) -> None:
        """Wait until the last save is published. Called by all ranks; what failed on one raises on all."""
        flight = self._flight
        if flight is None:
            return
        if isinstance(flight.error, MissingPart):
            flight.check()  # before any collective: that rank would not come to it either
        try:
            self._context.together(flight.wait_written)
            self._context.together(flight.wait_over)
        except PeerError:
            flight.is_told = True
            flight.cancelled.set()  # its part will not come
            raise
        self._flight = None

    def abandon(self) -> None:
        """After an error, so without a collective: let what is on its way arrive if it can, else clear it away."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        flight.written.wait()
        flight.thread.join(PEER_PATIENCE_S)
        flight.cancelled.set()
        flight.thread.join()
        if self._context.is_rank_zero and not flight.is_published:
            with contextlib.suppress(OSError):  # the next start clears it
                remove(flight.aside)
            if not flight.is_told:
                why = "the other ranks' parts did not come" if flight.error is None else str(flight.error)
                self._announce(f"dropped {flight.final.name}, which is not complete: {why}")

    def land(self) -> None:
        """Without a collective: wait until the last save is published or has failed, on whatever rank."""
        flight = self._flight
        if flight is None:
            return
        flight.thread.join()
        deadline = time.monotonic() + self._limits.collective_timeout_s
        while flight.error is None and flight.aside.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _copied(self, snapshot: Snapshot) -> Snapshot:
        parts = {"own": snapshot.own} | (snapshot.shared if self._context.is_rank_zero else {})
        self._buffers = {stem: copied(tensors, self._buffers.get(stem, {})) for stem, tensors in parts.items()}
        shared = {stem: tensors for stem, tensors in self._buffers.items() if stem != "own"}
        return Snapshot(snapshot.step, shared, self._buffers["own"], snapshot.state)

    def _write(self, flight: _Flight) -> None:
        """What the writer thread does; its errors wait for settle()."""
        try:
            if flight.copied is not None:
                flight.copied.synchronize()
            files = self._write_own(flight)
            flight.written.set()
            if self._context.is_rank_zero and self._has_all_parts(flight):
                flight.before()
                publish(flight.aside, flight.final, files)
                flight.is_published = True
                self._announce(f"saved {flight.final.name}")
                self._tell_if_slow(time.monotonic() - flight.began)
                tidy(flight.final, self._keep, is_best=flight.is_best)
        except Exception as error:
            flight.error = error
        finally:
            flight.written.set()

    def _tell_if_slow(self, took_s: float) -> None:
        """Once: a stop would not have the time for it."""
        note = grace_note(took_s, self._limits.grace_s)
        if note and not self._is_slow:
            self._is_slow = True
            self._announce(note)

    def _write_own(self, flight: _Flight) -> Facts:
        """Write this rank's files and return their facts, which rank 0 has in hand and the others leave for it."""
        aside, rank, snapshot = flight.aside, self._context.rank, flight.snapshot
        _make(aside)
        files = {rank_file(rank): snapshot.own}
        files |= {f"{stem}.safetensors": tensors for stem, tensors in snapshot.shared.items()}
        for name, tensors in files.items():
            write_tensors(aside / name, tensors)
        names = list(files)
        if rank == 0:
            write_text(aside / STATE, json.dumps(snapshot.state | {"format": FORMAT}, indent=1))
            names.append(STATE)
        facts = {name: {"bytes": (aside / name).stat().st_size, "sha256": sha256(aside / name)} for name in names}
        if rank != 0:
            part = _part(aside, rank)
            with in_one_sentence("write", part):
                write_atomically(part, json.dumps(facts))
        return facts

    def _has_all_parts(self, flight: _Flight) -> bool:
        """Wait for the other ranks; False if that was cancelled."""
        parts = [_part(flight.aside, rank) for rank in range(1, self._context.world_size)]
        deadline, is_last_look = time.monotonic() + self._limits.collective_timeout_s, False
        while missing := [part for part in parts if not part.exists()]:
            if is_last_look:
                return False
            if time.monotonic() > deadline:
                raise MissingPart(
                    f"{missing[0]} was not written within {self._limits.collective_timeout_s:g} s; "
                    "the last checkpoint stands; look at that rank's log, raise launch.collective_timeout_s, and on "
                    "several nodes use a --runs-dir that they share"
                )
            is_last_look = flight.cancelled.wait(_POLL_S)
        return True


def copied(tensors: Tensors, buffers: Tensors) -> Tensors:
    """`tensors` on the host, contiguous and apart from each other: in `buffers`, the result of the call before,
    where they fit. From a GPU the copies are enqueued like a kernel: it does them before what is enqueued next."""
    copies = {}
    for name, tensor in tensors.items():
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    return copies


def _mark() -> torch.cuda.Event | None:
    """The point after the copies that were enqueued on a GPU, to be waited for asleep."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event


def _part(aside: Path, rank: int) -> Path:
    """Where `rank` says that its files are complete."""
    return aside / PART.replace("*", str(rank))


def _make(aside: Path) -> None:
    """Make the folder to write in; the first rank that comes does."""
    with in_one_sentence("make", aside):
        if not aside.parent.exists():
            aside.parent.mkdir(parents=True, exist_ok=True)
            sync(aside.parent.parent)
        aside.mkdir(exist_ok=True)
