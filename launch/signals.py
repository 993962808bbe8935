"""Stop signals in the launcher: before the ranks run they end the command, later they are noted and passed on once."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from configs.errors import EXIT_INTERRUPTED, EXIT_STOPPED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# `timeout` signals a process and then its group: one Ctrl-C may arrive twice within microseconds.
SAME_CTRL_C_S = 0.2


class StopRequested(BaseException):
    """A stop signal came while nothing was running yet. Not an Exception: no handler in between may swallow it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def exit_code_of(name: str) -> int:
    return EXIT_INTERRUPTED if name == "SIGINT" else EXIT_STOPPED


def raise_on_stop() -> None:
    """From now on a stop signal raises StopRequested."""

    def handler(number: int, _frame: FrameType | None) -> None:
        raise StopRequested(signal.Signals(number).name)

    _install(handler)


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

    @contextlib.contextmanager
    def noted(self) -> Iterator["StopSignals"]:
        """Note stop signals instead of acting on them, inside."""
        before = _install(self._on_signal)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _install(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        # nohup ignores SIGHUP, and means it.
        if not (number == signal.SIGHUP and before[number] == signal.SIG_IGN):
            signal.signal(number, handler)
    return before
