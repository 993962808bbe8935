"""Stop signals in the launcher: first they end the command, then they are noted and passed on, at last ignored."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

from configs import run_dir
from configs.errors import EXIT_INTERRUPTED, EXIT_STOPPED

STOP_SIGNALS = tuple(signal.Signals[name] for name in run_dir.STOP_SIGNALS)
SIGNAL_WORDS = {
    signal.SIGKILL: "killed by SIGKILL (out of memory?)",
    signal.SIGBUS: "killed by SIGBUS (/dev/shm too small?)",
    signal.SIGSEGV: "killed by SIGSEGV (a crash in native code)",
    signal.SIGABRT: "killed by SIGABRT (a crash in native code)",
    signal.SIGILL: "killed by SIGILL (a build of torch for another CPU?)",
}

# `timeout` signals a process and then its group: one Ctrl-C may arrive twice within microseconds.
SAME_CTRL_C_S = 0.2
WAIT_POLL_S = 0.05


class StopRequested(BaseException):
    """A stop signal came while nothing was running yet. Not an Exception: no handler in between may swallow it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def exit_code_of(name: str) -> int:
    return EXIT_INTERRUPTED if name == "SIGINT" else EXIT_STOPPED


def signal_words(exit_code: int) -> str:
    """`exit code 7`, or the signal's name and what it usually means."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return f"killed by signal {-exit_code}"
    return SIGNAL_WORDS.get(number, f"killed by {number.name}")


def raise_on_stop() -> None:
    """From now on a stop signal raises StopRequested."""

    def handler(number: int, _frame: FrameType | None) -> None:
        raise StopRequested(signal.Signals(number).name)

    _install(handler)


def ignore_stops() -> None:
    """From now on a stop signal does nothing: the run has ended, and that is what the exit code tells."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopSignals:
    """What has been asked for so far: `name` is the first signal, `force` a second Ctrl-C."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.force = False
        self._last_ctrl_c = float("-inf")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            self.force = self.force or (self.name is not None and now - self._last_ctrl_c > SAME_CTRL_C_S)
            self._last_ctrl_c = now
        self.name = self.name or signal.Signals(number).name

    def wait(self, seconds: float, file: Path) -> None:
        """Sleep; a stop signal ends it, and so does `file`, which is removed then."""
        end = time.monotonic() + seconds
        while self.name is None and time.monotonic() < end:
            time.sleep(max(0.0, min(WAIT_POLL_S, end - time.monotonic())))
            if file.exists():
                self.name = self.name or run_dir.STOP_FILE
                with contextlib.suppress(OSError):
                    file.unlink()

    def note(self) -> None:
        """From now on note stop signals instead of acting on them."""
        _install(self._on_signal)

    def hear(self, numbers: Iterable[int]) -> None:
        """Note what was sent to another process and means the whole run."""
        for number in STOP_SIGNALS:
            if self.name is None and number in numbers:
                self.name = number.name


@contextlib.contextmanager
def blocked_for_children() -> Iterator[None]:
    """Processes that are started inside have the stop signals blocked until they unblock them themselves.

    A rank does so when its handlers stand, so that none that came before is lost or ends it. torchrun never does: it
    would end the ranks by its own rules, with its own grace time. See docs/decisions/0009-the-launcher-alone-stops.md.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _install(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in STOP_SIGNALS:
        # nohup ignores SIGHUP, and means it.
        if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):
            signal.signal(number, handler)
