"""What launcher and ranks tell each other: a plan going in, an outcome of each rank coming back, as JSON."""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from configs.derive import CPU_WORKERS, BatchPlan, plan_batches
from configs.schema import RunConfig

OUT_OF_MEMORY = "OutOfMemoryError"
"""Kind of an outcome; the launcher goes on with smaller micro-batches."""


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the whole new one, also after a power cut."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@dataclass(frozen=True)
class WorkerPlan:
    """`attempts/K/plan.json`: everything a rank must know that is not in torch's own environment variables."""

    mode: Literal["train", "eval"]
    config: RunConfig
    launcher: Literal["direct", "torchrun", "accelerate", "fork"]
    device: Literal["cuda", "cpu", "mps"]
    world_size: int
    local_world_size: int
    threads_per_rank: int
    store: str | None = None
    """File through which the ranks of one node meet; None when they meet at MASTER_ADDR:MASTER_PORT, or are alone."""
    terminal: str | None = None
    """The launcher's terminal device for the progress bar; None when it has none."""
    started: float = 0.0
    """Seconds since the epoch when the launcher was started; max_time_s counts from there. 0 = not known."""
    checkpoint: str = "best"
    """What `eval` loads: best, last, or a step number."""
    eval_data: str | None = None
    """A folder of images to evaluate in place of the run's own, its classes matched by name."""
    eval_changes: Sequence[str] = ()
    """What `eval` was given other than the run has it, such as `data.image_size: 224 -> 288`."""
    allow_changes: bool = False
    """Whether to go on with files of a data set that are not those that the checkpoint was trained on."""
    max_micro_batch: int | None = None
    """Samples per forward pass that the launcher allows, since more ran out of memory; None: what the config says."""
    auto_workers: int = CPU_WORKERS
    """Loader workers of a rank where data.num_workers is auto."""
    compile_pays: bool = False
    """What compile: auto means, by a measurement."""
    compile_reason: str = "nothing was measured"

    @property
    def batches(self) -> BatchPlan:
        """Of training; an evaluation cuts nothing for its processes, so any number of them will do."""
        return plan_batches(self.config, 1 if self.mode == "eval" else self.world_size, self.max_micro_batch)

    @property
    def num_workers(self) -> int:
        """Loader workers of a rank that streams."""
        return self.auto_workers if self.config.data.num_workers == "auto" else self.config.data.num_workers

    @property
    def compiles(self) -> bool:
        return self.compile_pays if self.config.compile == "auto" else self.config.compile

    def save(self, path: Path, **facts: Any) -> None:
        """Write the plan; `facts` (command, environment) are for the reader of the file only."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["config"] = self.config.model_dump(mode="json")
        write_atomically(path, json.dumps(fields | facts, indent=1))

    @classmethod
    def load(cls, path: Path) -> Self:
        fields = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name: fields[field.name] for field in dataclasses.fields(cls)}
        known["config"] = RunConfig.model_validate(known["config"])
        return cls(**known)


@dataclass(frozen=True)
class Outcome:
    """`attempts/K/outcome-rankR.json`: how one rank ended. A rank without one was killed."""

    rank: int
    status: Literal["done", "stopped", "failed"]
    time: float
    """Seconds since the epoch when the rank ended, to tell the first failure from those it caused."""
    exit_code: int = 0
    step: int | None = None
    epoch: int | None = None
    kind: str | None = None
    """Of a failure: a LockstepError's kind, the exception's class, or `peer` where another rank's end was the cause."""
    message: str | None = None
    where: str | None = None
    """file:line of the innermost frame outside installed packages."""
    signal: str | None = None
    """Of a stop: what asked for it, as StopFlag.signal."""
    checkpoint: str | None = None
    """Of a stop: name of the checkpoint to go on from."""

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Self | None:
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
