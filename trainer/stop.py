"""A request to stop: a signal sets a flag, nothing else; so do the end of the time and a file in the run folder.

No torch: the handlers stand before it is imported.
"""

import contextlib
import json
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from configs.run_dir import STOP_FILE, STOP_SIGNALS
from trainer.peers import PeerError


class StopFlag:
    """Set at most once; the loop reads it once a step and the ranks agree on the step (loop.py)."""

    def __init__(self) -> None:
        self.signal: str | None = None
        """What asked for it: a signal's name, max_time_s, or the stop file."""
        self.failed_peer: Callable[[], int | None] = lambda: None
        self._deadline = math.inf
        self._file: Path | None = None
        self._next_look = math.inf

    @property
    def is_set(self) -> bool:
        """Whether to stop. Raises PeerError if another rank is gone, which is why torchrun signals the rest: the ranks
        cannot agree on anything any more, and the last checkpoint stands."""
        if self.signal is None and time.monotonic() >= self._next_look:
            self._look()
        if self.signal is not None and (peer := self.failed_peer()) is not None:
            raise PeerError(f"rank {peer} is gone")
        return self.signal is not None

    def watch(self, seconds_left: float, file: Path | None) -> None:
        """Set the flag too when so many seconds are over, or when `file` appears: it is removed then, so that the next
        start does not stop at once. It is looked for once a second: on a network disk that costs milliseconds."""
        self._deadline, self._file = time.monotonic() + seconds_left, file
        self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now >= self._deadline:
            self.set("max_time_s")
        elif self._file is not None and self._file.exists():
            self.set(STOP_FILE)
            with contextlib.suppress(OSError):  # a folder, or not ours to remove: it stops the next start, too
                self._file.unlink()
        self._next_look = min(self._deadline, now + 1.0 if self._file is not None else math.inf)

    def set(self, name: str) -> None:
        self.signal = self.signal or name

    def install(self) -> None:
        """Catch the stop signals from now on. The launcher blocked them, so that those sent before now come too."""
        numbers = [signal.Signals[name] for name in STOP_SIGNALS]
        for number in numbers:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def look_for(self, request: Path) -> None:
        """Set the flag if the launcher left the file `request` before the signals were caught."""
        if request.exists():
            self.set(json.loads(request.read_text(encoding="utf-8"))["signal"])

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.set(signal.Signals(number).name)


def grace_note(save_s: float, grace_s: float) -> str | None:
    """What to say of a save that leaves a stopped run little of its time, or none: a step comes before it."""
    if save_s < 0.8 * grace_s:
        return None
    return f"note: a save takes {save_s:.3g} s and launch.grace_s is {grace_s:.3g} s: raise it"
