"""Starts `python -m launch ...` as a user would, and knows every process that comes of it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.run_dir import AttemptDir, RunDir
from launch.rank_environment import STRAY

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0
"""Only there to fail instead of hanging."""

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")

CONFIG = """\
max_epochs: 2
global_batch_size: 8
mixed_precision: no
device: cpu
data:
  name: tests.dist.toys:images
  num_classes: 4
  residency: device
model:
  name: mlp
  args:
    hidden: [1024]
optim:
  lr: 0.01
  momentum: 0.5
log:
  every_steps: 1
launch:
  num_threads: 1
"""


class Command:
    """One command that was started; `output` is what its user sees, stdout and stderr together."""

    def __init__(self, process: subprocess.Popen[bytes], console: Path) -> None:
        self.process, self.console = process, console

    @property
    def output(self) -> str:
        return self.console.read_bytes().decode()

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()

    @property
    def last_lines(self) -> str:
        """What is on the screen at the end."""
        return "\n".join(self.lines[-10:])

    def ends_with(self, code: int) -> None:
        """Wait for the end and check the exit code."""
        found = self.process.wait(TIMEOUT_S)
        assert found == code, f"exit code {found}, expected {code}:\n{self.output}"

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for an event that the command brings about while it runs."""

        def happened() -> bool:
            ended = self.process.poll() is not None
            assert condition() or not ended, f"it ended before {what}:\n{self.output}"
            return bool(condition())

        until(happened, what)

    def interrupt(self) -> None:
        """A Ctrl-C in its terminal: SIGINT for everything in the foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)


class Place:
    """A folder to work in, with `tiny.yaml`; `living` finds whatever runs on its behalf, in any session."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hold = folder, folder / "hold"
        # Not inside `folder`: names of sockets are limited to about 100 characters.
        self.temporary = Path(tempfile.mkdtemp(prefix="e2e-"))
        self.mark = uuid.uuid4().hex
        self.commands: list[Command] = []
        self.hold.mkdir()
        (folder / "tiny.yaml").write_text(CONFIG, encoding="utf-8")

    def environment(self) -> dict[str, str]:
        """Ours, without what would tell on the results."""
        other = {"OMP_NUM_THREADS", "LOCKSTEP_RUNS", "GLOO_SOCKET_IFNAME", "PYTHONPATH", "HOLD_AT"}
        own = {name: value for name, value in os.environ.items() if name not in other and not STRAY.fullmatch(name)}
        places = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary), "HOLD": str(self.hold)}
        # torch makes this one, for all runs of a user; elsewhere, so that `temporary` shows what ours leave behind.
        places["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")
        return own | places | {"LOCKSTEP_E2E": self.mark, "CUDA_VISIBLE_DEVICES": "", "EVAL_SIZE": "203"}

    def start(
        self,
        *arguments: str,
        terminal: int | None = None,
        wrapped_in: tuple[str, ...] = (),
        python: tuple[str, ...] = (),
        **environment: str,
    ) -> Command:
        """`python -m launch ARGUMENTS` in this folder, printing to a file or to `terminal`."""
        console = self.folder / f"console-{len(self.commands)}.txt"
        with console.open("wb") as file:
            process = subprocess.Popen(
                [*wrapped_in, sys.executable, *python, "-m", "launch", *arguments],
                cwd=self.folder,
                env=self.environment() | environment,
                stdin=subprocess.DEVNULL,
                stdout=file if terminal is None else terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if terminal is None else _own_terminal,
            )
        command = Command(process, console)
        self.commands.append(command)
        return command

    def run(self, *arguments: str, code: int = 0, **more: Any) -> Command:
        """The same to its end, which must be `code`."""
        command = self.start(*arguments, **more)
        command.ends_with(code)
        return command

    def run_dir(self, name: str) -> RunDir:
        return RunDir(self.folder / "runs" / name)

    def attempt(self, name: str, label: str = "001") -> AttemptDir:
        return self.run_dir(name).attempt(label)

    def held(self, num_ranks: int) -> Callable[[], bool]:
        """Whether that many ranks wait in tests.e2e.toys:Held."""
        return lambda: len(list(self.hold.glob("held-*"))) == num_ranks

    def living(self) -> list[int]:
        """All processes that inherited this place's mark, whoever their parent is by now."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in path.joinpath("environ").read_bytes():
                    found.append(int(path.name))
            except OSError:  # ended meanwhile, or someone else's
                continue
        return sorted(found)

    def kill_all(self) -> None:
        """SIGKILL to everything at once, as a machine that goes down."""

        def none_left() -> bool:
            for pid in self.living():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            return not self.living()

        until(none_left, "the end of killed processes")
        for command in self.commands:
            command.process.wait(TIMEOUT_S)

    def close(self) -> None:
        """Leave nothing behind; raises if a test or a command did."""
        left = {pid: _command_line(pid) for pid in self.living()}
        self.kill_all()
        shutil.rmtree(self.temporary)
        assert not left, f"processes left running: {left}"


def listening_on(pids: list[int]) -> list[str]:
    """Local addresses, as /proc/net has them, on which one of these processes listens."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(str(link.readlink()))
    tables = [path.read_text() for path in Path("/proc/net").glob("tcp*") if path.name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def is_loopback(address: str) -> bool:
    """127.x.x.x, ::1 or the first as an IPv6 address; the last byte of each group of four comes first."""
    if len(address) == 8:
        return address.endswith("7F")
    return address == "0" * 24 + "01000000" or (address[:24] == "0" * 16 + "FFFF0000" and address.endswith("7F"))


def until(condition: Callable[[], Any], what: str) -> None:
    """Poll for an event that another process brings about."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {TIMEOUT_S:g} s for {what}"
        time.sleep(0.02)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(1, termios.TIOCSCTTY, 0)  # the new session's own, as a shell's is


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "(ended meanwhile)"
