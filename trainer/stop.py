"""A request to stop: signals set a flag, nothing else. No torch: the handlers stand before it is imported."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from configs.run_dir import STOP_SIGNALS
from trainer.peers import PeerError


class StopFlag:
    """Set at most once; the loop reads it once a step and the ranks agree on the step (loop.py)."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self.failed_peer: Callable[[], int | None] = lambda: None

    @property
    def is_set(self) -> bool:
        """Whether to stop. Raises PeerError if another rank is gone, which is why torchrun signals the rest: the ranks
        cannot agree on anything any more, and the last checkpoint stands."""
        if self.signal is not None and (peer := self.failed_peer()) is not None:
            raise PeerError(f"rank {peer} is gone")
        return self.signal is not None

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
