"""Everything the loop works with, in one place; run.py builds it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from configs.derive import lr_at, total_steps
from configs.schema import RunConfig
from trainer.account import Account
from trainer.agreement import Agreed, HostCopy
from trainer.console import Console
from trainer.data.augment import Preprocess
from trainer.data.mixing import Mixing
from trainer.data.order import Order
from trainer.data.source import Source
from trainer.evaluate import EvalResult, Evaluator
from trainer.faults import Faults
from trainer.guard import Guard
from trainer.metrics import LossWindow
from trainer.optim import Ema
from trainer.optimizer import Optimizer
from trainer.runtime import RunContext
from trainer.saving import Saver
from trainer.shards import Shards
from trainer.state import TrainState
from trainer.stop import StopFlag
from trainer.tensors import Shapes
from trainer.tracking import NullTracker, SampleLog, Tracker

if TYPE_CHECKING:
    from trainer.speed import Speed
    from trainer.teacher import Teacher


@dataclass
class Clock:
    """What the account and the state said at the last log point, in seconds and samples."""

    busy_s: float = 0.0
    data_wait_s: float = 0.0
    samples: int = 0
    stall_s: float = 0.0
    """That training stood still for checkpoints, which are written while it goes on."""
    told_of_wait: bool = False
    """That training waits for its data."""
    started: float = field(default_factory=time.monotonic)
    last_save: float = field(default_factory=time.monotonic)


@dataclass
class Pending:
    """An update whose outcome was not read yet: on a GPU it is read one step later."""

    applied: HostCopy | None
    """False where the fp16 scaler found an overflow; None = applied for certain."""
    outcome: HostCopy
    """Where there are several ranks: their reduced signals. Else the loss."""
    lr: float
    num_samples: int
    flag: HostCopy | None
    """Of a guarded update: 1 where the batch was bad."""


@dataclass
class Job:
    """Everything the loop works with. `module` is what is called in training: `model` itself, or DDP around it."""

    config: RunConfig
    context: RunContext
    model: nn.Module
    module: nn.Module
    signals: nn.Parameter | None
    """What rides in DDP's all-reduce; None where there is no DDP."""
    shards: Shards | None
    """In place of DDP: the same bits on any number of processes."""
    optimizer: Optimizer
    ema: Ema | None
    source: Source
    order: Order
    preprocess: Preprocess
    mixing: Mixing | None
    image_shape: tuple[int, int, int]
    shapes: Shapes
    """Of the network's tensors, as it was built."""
    may_draw: bool
    """Whether the network may draw random numbers by itself."""
    channels_last: bool
    """The memory format of images and weights."""
    why_layout: str
    frozen_norms: list[nn.Module]
    """BatchNorm layers that stay in evaluation mode."""
    is_compiled: bool
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    teacher: "Teacher | None"
    """Whose answers are followed too; None: the labels alone."""
    evaluator: Evaluator
    tracker: Tracker | NullTracker
    console: Console
    stop: StopFlag
    account: Account
    window: LossWindow
    guard: Guard
    saver: Saver
    facts: dict[str, Any]
    """What its checkpoints say of the run; a resume compares some of it."""
    files_may_differ: bool
    """Whether a checkpoint fits though the files of its data set were others."""
    trains: bool
    """False where a checkpoint is only evaluated: what concerns training alone may be another."""
    samples: SampleLog | None
    """Where to write which samples are trained on; None where nobody asks."""
    faults: Faults | None
    """To be injected; None where there are none."""
    state: TrainState = field(default_factory=TrainState)
    clock: Clock = field(default_factory=Clock)
    quiet_until: int = 0
    """At boundaries before this many batches nothing is due."""
    has_checked_tensors: bool = False
    """After the first batch of this attempt."""
    pending: Pending | None = None
    last_gradient: list[RemovableHandle] = field(default_factory=list)
    """The hook that tells the account when this rank has computed all its gradients."""
    agreed: Agreed = field(default_factory=lambda: Agreed(stop=False, save=False, bad_ranks=()))
    grad_norm: Tensor | None = None
    speed: "Speed | None" = None
    """How samples/s are turned into TFLOP/s; None until the FLOPs are counted."""
    evaluations: dict[str, EvalResult] = field(default_factory=dict)
    metrics_bytes: int | None = None
    """Of metrics.jsonl: what belongs to the checkpoint that was restored; None if none was."""
    wall_s_before: float = 0.0
    """Seconds of earlier attempts up to the checkpoint that this one went on from."""
    time_before: dict[str, float] = field(default_factory=dict)
    """The same by kind, as the checkpoint's account says."""

    @cached_property
    def total_steps(self) -> int:
        return total_steps(self.config, self.order.batches_per_epoch)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """All that get a gradient, the ranks' signals too."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def class_names(self) -> list[str]:
        """Numbers where nobody named them."""
        return self.facts["classes"] or [str(number) for number in range(self.facts["num_classes"])]

    def wall_s(self) -> float:
        """Seconds of the run, start-up since the job was built included, what a crash threw away not."""
        return self.wall_s_before + time.monotonic() - self.clock.started

    def lr(self) -> float:
        return lr_at(self.state.step, self.config, self.order.batches_per_epoch)

    def is_finished(self) -> bool:
        if self.stops_early():
            return True
        if self.config.max_steps is not None:
            return self.state.step >= self.config.max_steps
        return self.state.epoch >= (self.config.max_epochs or 0)

    def stops_early(self) -> bool:
        """Whether so many evaluations in a row were no better that the run ends. Known to all ranks alike."""
        patience = self.config.early_stopping.patience
        return patience is not None and self.state.evaluations_without_better >= patience

    def is_at_end(self) -> bool:
        """Whether the last counted update was the run's last; its boundary may be still to come."""
        if self.is_finished():
            return True
        last_epoch = (self.config.max_epochs or 0) - 1
        ends_epoch = self.state.batch_in_epoch == self.order.batches_per_epoch
        return self.config.max_steps is None and self.state.epoch == last_epoch and ends_epoch

    def wants_save(self) -> bool:
        """Whether this rank wants all to save now: rank 0's clock says so, or its last save failed and all must know,
        which saving tells them."""
        return self.saver.has_failed or (self.context.is_rank_zero and self._minutes_are_over())

    def _minutes_are_over(self) -> bool:
        minutes = self.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self.clock.last_save >= 60 * minutes

    def fp16_scale(self) -> float:
        """The loss scale; waits for the device."""
        assert self.context.scaler is not None
        return float(self.context.scaler.get_scale())
