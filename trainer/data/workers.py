"""Loader workers: processes that read batches ahead. What kills one becomes one sentence with the fix; once the run has
been asked to stop it becomes nothing: the rank reads by itself the little that is left."""

import contextlib
import errno
import fcntl
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader

from configs.errors import EnvironmentProblem, LockstepError, TrainingError
from configs.run_dir import STOP_SIGNALS
from trainer.parent import die_with_parent
from trainer.stop import StopFlag


class Request(NamedTuple):
    """What one batch, or a part of it, is made of."""

    epoch: int
    draws: list[int]
    """See RankBatch.draws."""
    side: int | None = None
    """Of its images in pixels; None: data.image_size."""


Pair = tuple[Tensor, Tensor]
Read = Callable[[Request], Pair]

PREFETCH = 2
"""Batches that a worker is ahead; each lies in shared memory until it is used."""
STOP_PATIENCE_S = 1.0
"""A scheduler that ends everything may end the workers a moment before it signals the ranks."""

_SHM = Path("/dev/shm")  # noqa: S108  # not a temporary file: where torch puts what processes share
_SPARE_DESCRIPTORS = 8
_FEWER = "use fewer data.num_workers, or data.num_workers=0, which reads in the rank itself"
_LARGER_SHM = "use a larger one (docker: --shm-size), fewer data.num_workers, or data.num_workers=0"


class Workers:
    """Reads `requests` in order, through `num_workers` processes or, with 0, in this one."""

    _started: list["Workers"] = []  # noqa: RUF012  # of this process; those that are done are taken out

    def __init__(
        self, read: Read, requests: Iterable[Request], num_workers: int, *, pin: bool, stop: StopFlag | None
    ) -> None:
        self._read, self._stop = read, stop
        self._loaded: Iterator[Any] | None = None
        self._given_up: Iterator[Any] | None = None
        if num_workers == 0:
            return
        loader: DataLoader[Any] = DataLoader(
            _InWorker(read),  # type: ignore[arg-type]  # needs only __getitem__: the sampler says what to read
            batch_size=None,
            sampler=requests,
            num_workers=num_workers,
            prefetch_factor=PREFETCH,
            collate_fn=_as_it_is,
            worker_init_fn=partial(_start_worker, _folder(), os.getpid()),
            pin_memory=pin,
        )
        others = multiprocessing.active_children()
        try:
            self._loaded = iter(loader)
        except (OSError, RuntimeError) as error:
            raise explained(error, []) or error from error
        self._processes = [child for child in multiprocessing.active_children() if child not in others]
        _DEATHS.take_over()
        # Kept until tidy_up(): to give up a loader is to wait for its workers, each up to ten seconds.
        self._started.append(self)

    def next(self, request: Request) -> Pair:
        """The batch of `request`, which is the next of the requests. Raises EnvironmentProblem or TrainingError."""
        if self._loaded is None:
            return self._read(request)
        try:
            with _DEATHS.told():
                found = next(self._loaded)
        except Exception as error:  # of many classes, where a worker died while it was handing a batch over
            problem = explained(error, self._processes)
            if problem is None:
                raise
            if not self._stop_comes():
                raise problem from error
            self._given_up, self._loaded = self._loaded, None
            return self._read(request)
        if isinstance(found, LockstepError):
            raise found
        pair: Pair = found
        return pair

    def done(self) -> None:
        """All requests were read: the workers wait, and end at once."""
        if self._loaded is not None:
            self._started.remove(self)

    def _stop_comes(self) -> bool:
        until = time.monotonic() + STOP_PATIENCE_S
        while self._stop is not None and not self._stop.is_set and time.monotonic() < until:
            time.sleep(0.01)
        return self._stop is not None and self._stop.is_set


class _Deaths:
    """torch's handler of SIGCHLD raises wherever the process happens to be, in a save too. Here it is asked only where
    a batch is waited for, and there at once."""

    def __init__(self) -> None:
        self._tell: Any = None
        self._waits = False

    def take_over(self) -> None:
        """From the handler that torch installs with its first loader."""
        if signal.getsignal(signal.SIGCHLD) != self._on_child:
            self._tell = signal.signal(signal.SIGCHLD, self._on_child)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        self._waits = True
        try:
            self._on_child(signal.SIGCHLD, None)  # who died meanwhile
            yield
        finally:
            self._waits = False

    def _on_child(self, number: int, frame: Any) -> None:
        if self._waits and callable(self._tell):
            self._tell(number, frame)


_DEATHS = _Deaths()


class _InWorker:
    """What a worker does for one request. An error that is told to the user is handed over as it is, not raised."""

    def __init__(self, read: Read) -> None:
        self.read = read

    def __getitem__(self, request: Request) -> Pair | LockstepError:
        try:
            _check_descriptors()
            images, labels = self.read(request)
            return _shared(images), _shared(labels)
        except LockstepError as error:
            return error


def _check_descriptors() -> None:
    """torch hands tensors over in a thread of its own, which drops a batch for want of descriptors without a word."""
    opened = []
    try:
        for _ in range(_SPARE_DESCRIPTORS):
            opened.append(os.dup(0))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise too_many_files() from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _shared(tensor: Tensor) -> Tensor:
    """In shared memory, here: in torch's thread a full /dev/shm would drop the batch without a word."""
    try:
        shared: Tensor = tensor.share_memory_()
        return shared
    except (OSError, RuntimeError) as error:
        if "Too many open files" in str(error):
            raise too_many_files() from error
        what = f"{_SHM} cannot take a batch of {tensor.nbytes:,} bytes ({_free_shm() or 0:,} free): {error}"
        raise EnvironmentProblem(f"{what}; {_LARGER_SHM}") from error


def too_many_files() -> EnvironmentProblem:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return EnvironmentProblem(f"too many open files: a process may have {limit}; raise `ulimit -n`, or {_FEWER}")


def _as_it_is(found: Any) -> Any:
    return found


def _start_worker(folder: str, rank_pid: int, _worker_id: int) -> None:
    die_with_parent(rank_pid)
    tempfile.tempdir = folder  # its socket lies there, and would be left by a worker that is killed
    for name in STOP_SIGNALS:  # a scheduler signals every process; the rank stops, and its workers end with it
        signal.signal(signal.Signals[name], signal.SIG_IGN)


@cache
def _folder() -> str:
    """Of this rank, for its workers' temporary files. Locked as the launcher's own folder is: what a killed rank leaves
    behind, the next launch removes (launch/meeting.py)."""
    folder = tempfile.mkdtemp(prefix=f"lockstep-{os.getpid()}-")
    lock = os.open(Path(folder) / "lock", os.O_RDWR | os.O_CREAT)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX)
    return folder


def tidy_up() -> None:
    """End what is left of the workers, at the end of the rank: nobody waits for what they read any more."""
    if _folder.cache_info().currsize == 0:
        return
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()
    shutil.rmtree(_folder(), ignore_errors=True)
    _folder.cache_clear()  # a rollback trains on, with workers that need another


def explained(error: Exception, processes: Sequence[BaseProcess]) -> LockstepError | None:
    """What `error` means if one of these workers died or cannot be reached, with the fix; else None."""
    if "Too many open files" in str(error):
        return too_many_files()
    if not isinstance(error, OSError | EOFError) and "DataLoader worker (pid" not in str(error):
        return None
    # A rank may see the broken pipe of a worker before its end.
    until = time.monotonic() + 1.0
    while not (dead := [process for process in processes if process.exitcode]) and time.monotonic() < until:
        time.sleep(0.01)
    if dead:
        return _death(dead[0].pid, dead[0].exitcode or 0)
    return EnvironmentProblem(f"loader workers cannot be used: {error or type(error).__name__}; {_FEWER}")


def _death(pid: int | None, code: int) -> LockstepError:
    who = f"a loader worker (pid {pid})"
    if code > 0:
        return TrainingError(f"{who} ended with exit code {code}; data.num_workers=0 shows where in the data set")
    name = signal.Signals(-code).name
    if name in ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE"):
        return TrainingError(f"{who} was killed by {name}, a crash in native code; data.num_workers=0 shows where")
    if name == "SIGBUS":
        return EnvironmentProblem(f"{who} was killed by SIGBUS, usually because /dev/shm is full: {_LARGER_SHM}")
    why = ", usually because memory ran out" if name == "SIGKILL" else ""
    return EnvironmentProblem(f"{who} was killed by {name}{why}: {_FEWER}")


def check_shared_memory(ranks: int, workers: int, batch_bytes: int, more_bytes: int) -> list[str]:
    """Raise EnvironmentProblem if the batches that the workers of this node read ahead do not fit in /dev/shm. Returns
    a warning if they do not together with those of an evaluation: `more_bytes` of each rank."""
    free = _free_shm()
    needed, more = ranks * workers * PREFETCH * batch_bytes, ranks * more_bytes
    if free is None or needed + more <= free:
        return []
    text = f"{_SHM} has {free:,} bytes free and {ranks} x {workers} loader workers may need"
    ahead = f"{PREFETCH} batches of {batch_bytes:,} bytes ahead"
    if needed > free:
        raise EnvironmentProblem(f"{text} {needed:,} ({ahead} each); {_LARGER_SHM}")
    return [f"warning: {text} {needed + more:,} in an evaluation; {_LARGER_SHM}"]


def _free_shm() -> int | None:
    """Bytes; None where shared memory is no file system."""
    try:
        stats = os.statvfs(_SHM)
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize
