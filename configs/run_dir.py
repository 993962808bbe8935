"""The names of the files in a run folder, through which launcher and ranks work together."""

import re
from dataclasses import dataclass
from pathlib import Path

from configs.errors import ConfigError

STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""What asks a run to save and stop, sent to the launcher or to any rank."""
STOP_FILE = "the stop file"
"""Beside a signal's name: what asked for a stop."""

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
STEP_FOLDER = re.compile(r"step_(\d{8,})")
"""A published checkpoint; a name that only resembles one is none."""


def step_name(step: int) -> str:
    """Name of the checkpoint after `step` updates."""
    return f"step_{step:08d}"


def checked_run_name(name: str) -> str:
    """Return `name`, or raise ConfigError: a plain folder name can neither leave runs/ nor inject anything."""
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
    def number(self) -> int:
        """Which start of the run this is, from 1; 0 for an evaluation. Labels are `001`, `001-node1`, `eval-001`."""
        label = self.path.name.partition("-")[0]
        return int(label) if label.isdigit() else 0

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def config(self) -> Path:
        """Settings that become the run's own once the ranks found that they fit; see commit_settings()."""
        return self.path / "config.yaml"

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

    @property
    def resumed(self) -> Path:
        """Written by rank 0 when training begins: the checkpoint that it goes on from, and its step."""
        return self.path / "resumed.json"

    @property
    def restart(self) -> Path:
        """Written by the launcher where it started this attempt by itself: after what, and at what cost."""
        return self.path / "restart.json"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"

    def pid(self, rank: int) -> Path:
        return self.path / f"pid-rank{rank}"

    def samples(self, rank: int) -> Path:
        """With log.sample_ids: a line for each batch that this rank trained on."""
        return self.path / f"samples-rank{rank}.jsonl"

    def outcome(self, rank: int) -> Path:
        return self.path / f"outcome-rank{rank}.json"

    def beat(self, rank: int) -> Path:
        """What the rank is doing; see configs/beat.py."""
        return self.path / f"beat-rank{rank}"

    @property
    def nccl(self) -> Path:
        """What NCCL's flight recorder dumps, with the rank's number behind it."""
        return self.path / "nccl-rank"

    @property
    def verdict(self) -> Path:
        """The first line of what the launcher said at its end."""
        return self.path / "verdict.txt"

    @property
    def ended(self) -> Path:
        """When the last process of the attempt was gone, in seconds since the epoch; written by the launcher."""
        return self.path / "ended"


@dataclass(frozen=True)
class RunDir:
    """`runs/NAME`. TensorBoard's event files lie directly in it: `tensorboard --logdir runs` lists runs by name."""

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
    def stop(self) -> Path:
        """`touch` it to have the run save and stop."""
        return self.path / "stop"

    @property
    def bad_batches(self) -> Path:
        """A line with the sample ids of each batch that was left out because its loss or gradient was bad."""
        return self.path / "bad_batches.jsonl"

    @property
    def bad_images(self) -> Path:
        """A line with the path of each image that could not be decoded, under data.on_bad_image: skip."""
        return self.path / "bad_images.txt"

    @property
    def micro_batch(self) -> Path:
        """How many samples a forward pass may have, once more ran out of memory; to be deleted by who knows better."""
        return self.path / "micro_batch.json"

    @property
    def classes(self) -> Path:
        """The names of the classes, a list whose item i is class i of `weights`; not there where nobody named them."""
        return self.path / "classes.json"

    @property
    def compile_choice(self) -> Path:
        """What `compile: auto` was found to mean; to be deleted to have it measured again."""
        return self.path / "compile.json"

    @property
    def weights(self) -> Path:
        """The finished run's weights with plain names, those that "best" was judged on."""
        return self.path / "model.safetensors"

    def attempt(self, label: str) -> AttemptDir:
        return AttemptDir(self.path / "attempts" / label)


def commit_settings(run: RunDir, attempt: AttemptDir) -> None:
    """Make the attempt's settings, if it brought other ones, those of the run; a finished run is finished no more.

    By rank 0, before its first step and after all ranks have restored the checkpoint: until then nothing is changed.
    """
    if attempt.config.exists():
        if run.result.exists():
            run.result.rename(attempt.path / "result-before.json")
        attempt.config.replace(run.config)
