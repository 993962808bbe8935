"""What the command line asks for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from configs.run_dir import AttemptDir
from launch.backends import Launcher, Rendezvous


@dataclass(frozen=True)
class Request:
    """Everything but the config; paths are absolute and need not exist."""

    run_name: str
    attempt: AttemptDir
    meeting: Path
    """A fresh folder, outside the run, for the files through which the ranks of one node meet."""
    python: str
    root: Path
    """The folder that holds configs/, launch/ and trainer/."""
    cwd: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    mode: Literal["train", "eval"] = "train"
    checkpoint: str = "best"
    nproc: int | Literal["auto"] = 1
    launcher: Launcher = "torchrun"
    nodes: Rendezvous | None = None
    interface: str | None = None
    """Network interface towards the other nodes."""
    terminal: str | None = None
    started: float = 0.0
    """Seconds since the epoch when the command was given; a restart keeps it."""
    worker: str = "trainer"
    eval_data: str | None = None
    eval_changes: Sequence[str] = ()
    allow_changes: bool = False
    max_micro_batch: int | None = None
    """What the run remembers to fit in memory."""
