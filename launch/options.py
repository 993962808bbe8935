"""The command line as typed, and the checks of it that need neither the config nor the machine."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from configs.errors import ConfigError
from launch.backends import Launcher, Rendezvous

ROOT = Path(__file__).resolve().parent.parent
"""The folder that holds configs/, launch/ and trainer/."""


@dataclass(frozen=True)
class Options:
    """The command line, as typed; None is "not given"."""

    overrides: Sequence[str] = ()
    nproc: str | None = None
    launcher: Launcher | None = None
    name: str | None = None
    fresh: bool = False
    allow_changes: bool = False
    runs: Path = Path("runs")
    nnodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None
    local_addr: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable
    cwd: Path = field(default_factory=Path.cwd)
    worker: str = "trainer"
    started: float = field(default_factory=time.time)

    def resume_command(self, name: str, arguments: str = "") -> str:
        """What to type to go on: a make target in the project's own folder, else the command itself."""
        if self.cwd == ROOT and self.runs == Path("runs"):
            return f"make resume RUN={name}" + (f' ARGS="{arguments}"' if arguments else "")
        folder = "" if self.runs == Path("runs") else f" --runs-dir {shlex.quote(str(self.runs))}"
        return f"python -m launch resume {name}{folder}" + (f" {arguments}" if arguments else "")


def parse_nproc(text: str | None) -> int | Literal["auto"]:
    if text is None:
        return 1
    if text == "auto":
        return "auto"
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(
            f"--nproc (NGPU) is a number of processes: expected a whole number >= 1 or auto, got {text!r}"
        )
    return int(text)


def parse_checkpoint(text: str) -> str:
    if text not in ("best", "last") and not (text.isascii() and text.isdigit()):
        raise ConfigError(f"--checkpoint: expected best, last or the number of a step, got {text!r}")
    return text


def parse_nodes(options: Options) -> Rendezvous | None:
    """Raises ConfigError with everything that several nodes need and have not got."""
    if options.nnodes == 1 and options.endpoint is None and options.node_rank == 0:
        return None
    problems = []
    if options.nnodes < 1 or not 0 <= options.node_rank < options.nnodes:
        problems.append(f"--node-rank {options.node_rank} is not below --nnodes {options.nnodes}")
    if not _is_endpoint(options.endpoint):
        problems.append(f"--nnodes needs --rdzv-endpoint HOST:PORT, the same on every node; got {options.endpoint!r}")
    if options.nnodes > 1 and options.name is None:
        problems.append("--nnodes needs --run-name NAME, the same on every node")
    if options.nnodes > 1 and options.fresh:
        problems.append("--fresh would choose a name on each node by itself; with --nnodes use a new --run-name")
    if problems:
        raise ConfigError(*problems)
    assert options.endpoint is not None
    from launch.preflight import local_address

    local_addr = options.local_addr or local_address(options.endpoint)
    return Rendezvous(options.nnodes, options.node_rank, options.endpoint, local_addr)


def _is_endpoint(endpoint: str | None) -> bool:
    host, _, port = (endpoint or "").rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536


def together(*steps: Callable[[], Any]) -> list[Any]:
    """Run every step and raise one ConfigError with the problems of all."""
    results, problems = [], []
    for step in steps:
        try:
            results.append(step())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return results
