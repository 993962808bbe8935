"""The names of the files in a run folder: the whole contract between launcher and worker besides the torch
environment."""

import re
from dataclasses import dataclass
from pathlib import Path

from configs.errors import ConfigError

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def checked_run_name(name: str) -> str:
    """Return `name`, or raise ConfigError: a run name is a plain folder name, so it cannot leave runs/ or inject
    anything."""
    if not RUN_NAME.fullmatch(name):
        raise ConfigError(
            f"run name {name!r} is not usable; use letters, digits, '.', '_' and '-', starting with a letter or digit"
        )
    return name


@dataclass(frozen=True)
class AttemptDir:
    """One start of the run: `runs/NAME/attempts/K`."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def agent_log(self) -> Path:
        """What torchrun or accelerate themselves print, and a rank before its own log is open."""
        return self.logs / "launcher.log"

    @property
    def stop_request(self) -> Path:
        """Written by the launcher before it signals the ranks; a rank that is still starting finds it here."""
        return self.path / "stop.json"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"

    def pid(self, rank: int) -> Path:
        return self.path / f"pid-rank{rank}"

    def outcome(self, rank: int) -> Path:
        return self.path / f"outcome-rank{rank}.json"


@dataclass(frozen=True)
class RunDir:
    """`runs/NAME`. TensorBoard's event files lie directly in it, so that `tensorboard --logdir runs` lists runs by
    name."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def weights(self) -> Path:
        """The finished run's weights with plain names, those that "best" was judged on."""
        return self.path / "model.safetensors"

    def attempt(self, label: str) -> AttemptDir:
        return AttemptDir(self.path / "attempts" / label)
