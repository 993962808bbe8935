"""PURE: whether a run that failed is started again, after how long, with what micro-batch, and how that is told."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.contract import OUT_OF_MEMORY
from configs.derive import counted
from configs.errors import EXIT_TRAINING, TrainingError
from configs.run_dir import step_name
from configs.sections import LaunchConfig

MAX_WAIT_S = 60.0
# Mistakes in the user's code; and training errors follow from samples, weights and settings, which stay as they are.
HOPELESS = (
    *("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"),
    *("NameError", "UnboundLocalError", "AttributeError", "TypeError", "NotImplementedError"),
    TrainingError.kind,
)


@dataclass(frozen=True)
class Failure:
    """What an attempt failed of."""

    kind: str
    """As in Outcome.kind; of a rank that left no outcome, how it ended."""
    said: str
    """The cause as it was shown, on one line."""
    rank: int | None = None
    step: int | None = None
    """Updates that the attempt had reached; None if it had not begun to train."""
    exit_code: int = EXIT_TRAINING

    @property
    def cause(self) -> str:
        """What stays the same when the same happens again: without pids, addresses and sizes."""
        return f"{self.kind}: {re.sub(r'0x[0-9a-fA-F]+|[0-9]+', '#', self.said)}"

    def is_again(self, earlier: "Failure") -> bool:
        return (self.cause, self.step) == (earlier.cause, earlier.step)


@dataclass(frozen=True)
class Decision:
    """What is done about the last failure."""

    again: bool
    why: str = ""
    """For the user; empty where nobody asked for restarts."""
    wait_s: float = 0.0
    max_micro_batch: int | None = None
    """What micro-batches are limited to from now on; None: as before."""


def judge(failures: Sequence[Failure], launch: LaunchConfig, micro_batch: int, unit: int = 1) -> Decision:
    """Decide after the last of `failures`, one an attempt; `micro_batch` is what that attempt had, `unit` how many
    samples are never parted."""
    *earlier, last = failures
    if last.kind == OUT_OF_MEMORY:
        return _with_half(last, micro_batch, unit)
    if launch.max_restarts == 0:
        return Decision(again=False)
    number = 1 + sum(failure.kind != OUT_OF_MEMORY for failure in earlier)
    reason = _hopeless(earlier, last)
    if reason is None and number > launch.max_restarts:
        reason = f"{counted(launch.max_restarts, 'restart')} (launch.max_restarts) did not help"
    if reason is not None:
        return Decision(again=False, why=f"not restarted: {reason}")
    wait_s = min(MAX_WAIT_S, launch.restart_wait_s * 2.0 ** min(number - 1, 64))
    return Decision(again=True, why=f"restart {number} of {launch.max_restarts} in {wait_s:g} s", wait_s=wait_s)


def _with_half(last: Failure, micro_batch: int, unit: int) -> Decision:
    """Less memory is needed only by what goes through the network: the samples of one micro-batch."""
    if last.step is None:
        return Decision(again=False, why="not restarted: it did not fit before the first sample was seen")
    if micro_batch <= unit:
        least = "one sample" if unit == 1 else f"{micro_batch} samples that are mixed with each other"
        why = f"the micro-batch is {least} already; use a smaller network, mixed_precision: bf16, or more memory"
        return Decision(again=False, why=f"not restarted: {why}")
    return Decision(again=True, why="restart", max_micro_batch=-(-micro_batch // 2))


def _hopeless(earlier: Sequence[Failure], last: Failure) -> str | None:
    if last.exit_code != EXIT_TRAINING:
        return "this has to be put right first"
    if last.kind in HOPELESS:
        return "it would end in the same way again"
    if any(last.is_again(failure) for failure in earlier):
        return f"the same has happened before, {_where(last)}"
    return None


@dataclass(frozen=True)
class Restart:
    """`attempts/K/restart.json`: which attempt K was started after, what had ended that one, what it costs."""

    after: str
    """Label of the attempt that failed."""
    failure: Failure
    checkpoint_step: int | None
    """Step of the checkpoint to go on from; None: from the beginning."""
    wait_s: float
    max_micro_batch: int | None = None

    @property
    def steps_replayed(self) -> int:
        """Updates of the failed attempt that are not in the checkpoint. Their sum is what all restarts cost."""
        return max(0, (self.failure.step or 0) - (self.checkpoint_step or 0))

    def describe(self) -> str:
        """One line of the summary."""
        who = "" if self.failure.rank is None else f"rank {self.failure.rank}: "
        end = f"attempt {self.after} ended {_where(self.failure)}, {who}{self.failure.said}"
        return f"{end}; went on from {self._checkpoint}, {counted(self.steps_replayed, 'step')} replayed"

    def announce(self, decision: Decision) -> str:
        return f"{decision.why}: from {self._checkpoint} ({counted(self.steps_replayed, 'step')} will be replayed)"

    def facts(self) -> dict[str, Any]:
        """What is written down."""
        return dataclasses.asdict(self) | {"steps_replayed": self.steps_replayed}

    @property
    def _checkpoint(self) -> str:
        return "the beginning" if self.checkpoint_step is None else step_name(self.checkpoint_step)


def summary(restarts: Sequence[Restart]) -> list[str]:
    """The last lines about a run that was restarted; none about one that was not."""
    if not restarts:
        return []
    return [f"{counted(len(restarts), 'restart')}:", *(f"  {restart.describe()}" for restart in restarts)]


def _where(failure: Failure) -> str:
    if failure.step is None:
        return "before its first step"
    return f"at step {failure.step}"
