"""The console is rank 0's log, copied as it grows."""

import os
import sys
from pathlib import Path
from typing import BinaryIO

from configs.text import printable

CLEAR_LINE = b"\r\x1b[K"


class LogFollower:
    """Copies what is new in `path` to `out`; on a terminal each line first clears the bar that the rank draws there."""

    def __init__(self, path: Path, out: BinaryIO, *, on_terminal: bool) -> None:
        self._path, self._out, self._on_terminal = path, out, on_terminal
        self._file: BinaryIO | None = None
        self._partial = b""
        self._closed = self._left = False

    def poll(self) -> None:
        """Copy the complete lines that have come."""
        if self._left:
            return
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
        new = self._file.read()
        if new:
            *lines, self._partial = (self._partial + new).split(b"\n")
            self._write(lines)

    def say(self, text: str) -> None:
        """A line of the launcher's own in between."""
        self._write([text.encode()])

    def leave(self) -> None:
        """Copy what has come so far and nothing of what comes later: it stays in the log."""
        self.poll()
        self._left = True

    def finish(self) -> None:
        """Copy the rest, an unfinished line too, clear what is left of a bar, and close the file."""
        self.poll()
        self._write([self._partial] if self._partial else [], last=True)
        self._partial = b""
        if self._file:
            self._file.close()

    def _write(self, lines: list[bytes], *, last: bool = False) -> None:
        clear = CLEAR_LINE if self._on_terminal else b""
        text = b"".join(clear + line + b"\n" for line in lines) + (clear if last else b"")
        if self._closed or not text:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except OSError:  # `| head` has seen enough, or the terminal is gone: the training goes on, the log has it all
            self._closed = True
            silence_stdout()


def silence_stdout() -> None:
    """Point file descriptor 1 nowhere, so that neither later lines nor Python's flush at exit fail."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.close(sink)


def say(text: str, *, to_stderr: bool = False) -> None:
    """One line of the launcher's own, or several; names and errors of others cannot steer the terminal."""
    try:
        print("\n".join(map(printable, text.split("\n"))), file=sys.stderr if to_stderr else sys.stdout, flush=True)
    except OSError:
        silence_stdout()


def shown(path: Path, cwd: Path) -> Path:
    """`path` as the user would type it."""
    return path.relative_to(cwd) if path.is_relative_to(cwd) else path
