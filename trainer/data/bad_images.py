"""Images that cannot be decoded, in one list for all processes of a run, and never more than the user lets pass."""

import contextlib
import fcntl
from pathlib import Path

from configs.derive import counted
from configs.errors import TrainingError
from configs.text import printable
from trainer.disk import in_one_sentence


class BadImages:
    """`log` has a line for each; no more than `limit`."""

    def __init__(self, log: Path, limit: int) -> None:
        self.log, self.limit = log, limit
        self._known: set[str] = set()

    def add(self, path: str, why: str, instead: str) -> None:
        """List an image, once in the run, and say what takes its place. Raises TrainingError beyond the limit."""
        if path in self._known:
            return
        self._known.add(path)
        line = printable(path)
        with in_one_sentence("write", self.log), self.log.open("a+", encoding="utf-8") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            listed = file.read().splitlines()
            if line not in listed:
                listed.append(line)
                file.write(f"{line}\n")
                file.flush()
                print(f"bad image  {line}: {printable(why)}; in its place {printable(instead)}", flush=True)
        if len(listed) > self.limit:
            raise TrainingError(
                f"{counted(len(listed), 'image')} cannot be decoded and data.max_bad_images is {self.limit}; "
                f"they are listed in {self.log}: repair or remove them, or allow more"
            )
