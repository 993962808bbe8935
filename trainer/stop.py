"""A request to stop: signals set a flag, nothing else. No torch: the handlers stand before it is imported."""

import json
import signal
from pathlib import Path
from types import FrameType

from configs.run_dir import STOP_SIGNALS


class StopFlag:
    """Set at most once; the loop reads it once a step and the ranks agree on the step (loop.py)."""

    def __init__(self) -> None:
        self.signal: str | None = None

    @property
    def is_set(self) -> bool:
        return self.signal is not None

    def set(self, name: str) -> None:
        self.signal = self.signal or name

    def install(self) -> None:
        """Catch the stop signals from now on."""
        for name in STOP_SIGNALS:
            signal.signal(signal.Signals[name], self._on_signal)

    def look_for(self, request: Path) -> None:
        """Set the flag if the launcher left the file `request` before the signals were caught."""
        if request.exists():
            self.set(json.loads(request.read_text(encoding="utf-8"))["signal"])

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.set(signal.Signals(number).name)
