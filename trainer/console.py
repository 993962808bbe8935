"""What rank 0 shows: lines on its log, which the launcher copies to the screen, and a bar where there is a terminal."""

import contextlib
import time
from collections import deque
from typing import IO, Any

from configs.text import printable


class Console:
    """`line` for facts; `progress` for where the run is: a bar on `terminal`, else one line every `every_s` seconds."""

    def __init__(self, *, active: bool, terminal: str | None, every_s: float) -> None:
        self.active = active
        self.every_s = every_s
        self._terminal: IO[str] | None = open(terminal, "w", encoding="utf-8") if active and terminal else None  # noqa: SIM115
        self._bar: Any = None
        self._last_line = time.monotonic()
        self._posted: deque[str] = deque()

    def post(self, text: str) -> None:
        """`line` for other threads: shown with the training thread's next step or line, so that none is torn."""
        self._posted.append(text)

    def line(self, text: str) -> None:
        self._show_posted()
        self._show(text)

    def _show_posted(self) -> None:
        while self._posted:
            self._show(self._posted.popleft())

    def _show(self, text: str) -> None:
        if self.active:
            print(printable(text), flush=True)
            self._last_line = time.monotonic()

    def start(self, total: int, step: int) -> None:
        if self._terminal is not None:
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # its thread helps bars that are seldom updated; this one is at every step
            self._bar = tqdm(
                total=total, initial=step, file=self._terminal, unit="step", dynamic_ncols=True, leave=False
            )

    def progress(self, step: int, total: int, epoch: int, train_loss: float | None) -> None:
        """Called after each step; cheap unless something is shown."""
        if self._posted:
            self._show_posted()
        if self._bar is not None:
            self._bar.n = step
            self._bar.set_postfix_str("" if train_loss is None else f"train/loss {train_loss:.4f}", refresh=False)
            self._bar.update(0)
        elif self.active and time.monotonic() - self._last_line >= self.every_s:
            loss = "" if train_loss is None else f"  train/loss {train_loss:.4f}"
            self.line(f"step {step}/{total}  epoch {epoch}{loss}")

    def close(self) -> None:
        self._show_posted()
        with contextlib.suppress(OSError):  # the terminal may be gone by now
            if self._bar is not None:
                self._bar.close()
            if self._terminal is not None:
                self._terminal.close()
