"""What happens when a batch is bad: its loss or its gradient is not finite, or its loss is a spike."""

import json
import math
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn

from configs.contract import write_atomically
from configs.errors import TrainingError
from configs.schema import RunConfig
from trainer.agreement import Agreed
from trainer.data.order import Order
from trainer.disk import in_one_sentence
from trainer.state import TrainState


class BadBatchError(TrainingError):
    """Raised by all ranks at the same update under `nonfinite: rollback`."""


class Guard:
    """Flags bad batches on the device, so that their update never lands and nothing waits for the host.

    Decides by what all ranks hold in common (reduced signals and gradients), so all decide alike.
    """

    def __init__(self, config: RunConfig, model: nn.Module, log: Path, *, is_rank_zero: bool) -> None:
        self.policy, self._limits = config.nonfinite, config.guard
        self.is_on = self.policy != "stop" or self._limits.spike_factor is not None
        self._log = log if is_rank_zero else None
        device = next(model.parameters()).device
        self._found, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        restores = self.policy == "skip"
        self._buffers = list(model.buffers()) if restores else []
        self._before = [buffer.clone() for buffer in self._buffers]

    def remember(self) -> None:
        """Before the forward pass: what it changes besides the gradients, such as BatchNorm's running statistics."""
        for before, buffer in zip(self._before, self._buffers, strict=True):
            before.copy_(buffer)

    def restore(self, flag: Tensor) -> None:
        """Take back what the forward pass changed, if `flag` is 1."""
        for before, buffer in zip(self._before, self._buffers, strict=True):
            buffer.copy_(torch.where(flag > 0, before, buffer))

    def flag(self, bad_loss: Tensor, mean_loss: Tensor, gradients: list[Tensor], state: TrainState) -> Tensor:
        """Float scalar on the device: 1 for a bad batch. `gradients` are those to look at, if any."""
        bad = bad_loss
        if (limit := self.spike_limit(state)) < math.inf:
            bad = bad | (mean_loss > limit)
        if gradients:
            bad = bad | (self.not_finite(gradients) > 0)
        return bad.float()

    def not_finite(self, gradients: list[Tensor]) -> Tensor:
        """1 if any element is not finite: the one pass that fp16's scaler makes, with a scale of one."""
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found.zero_(), self._one)
        return self._found

    def spike_limit(self, state: TrainState) -> float:
        """The loss above which a batch is bad; infinite until the window is full."""
        factor, recent = self._limits.spike_factor, state.recent_losses
        if factor is None or len(recent) < self._limits.spike_window_steps:
            return math.inf
        return factor * statistics.median(recent)

    def note_loss(self, loss: float, state: TrainState) -> None:
        """Add a good batch's mean loss to the window."""
        if self._limits.spike_factor is not None:
            state.recent_losses = [*state.recent_losses, loss][-self._limits.spike_window_steps :]

    def reason(self, agreed: Agreed, state: TrainState) -> str:
        """Why the last batch was flagged."""
        if agreed.bad_ranks:
            return f"the loss is not finite on rank {', '.join(map(str, agreed.bad_ranks))}"
        if agreed.loss > self.spike_limit(state):
            median = statistics.median(state.recent_losses)
            return f"its loss, {agreed.loss:.4g}, is {agreed.loss / median:.1f} times the median, {median:.4g}"
        return "the gradient is not finite"

    def drop(self, state: TrainState, reason: str, order: Order) -> str:
        """Count a dropped update (the state has counted the batch already). Returns the console's line.

        Raises TrainingError when too many were dropped. One always may be, whatever its share.
        """
        state.dropped += 1
        share = math.ceil(self._limits.max_skipped_fraction * state.batch)
        allowed = min(self._limits.max_skipped, max(1, share))
        if state.dropped > allowed:
            raise TrainingError(
                f"{state.dropped} of {state.batch} updates were dropped, more than allowed (guard.max_skipped "
                f"{self._limits.max_skipped}, guard.max_skipped_fraction {self._limits.max_skipped_fraction:g}); "
                f"the last one at step {state.step} because {reason}; use a lower optim.lr or optim.max_grad_norm"
            )
        self.record("dropped", state, state.batch - 1, reason, order)
        return f"dropped the update on batch {state.batch - 1} at step {state.step}: {reason}"

    def forget_after(self, state: TrainState) -> None:
        """Drop from bad_batches.jsonl what came after the checkpoint that was restored: it may come out otherwise."""
        if self._log is None or not self._log.exists():
            return
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if _is_before(line, state)]
        with in_one_sentence("write", self._log):
            write_atomically(self._log, "".join(line + "\n" for line in kept))

    def record(self, what: str, state: TrainState, batch: int, reason: str, order: Order) -> None:
        """One line with the batch's sample ids in bad_batches.jsonl; a replay does not double it."""
        if self._log is None:
            return
        epoch, index = divmod(batch, order.batches_per_epoch)
        facts = {"what": what, "batch": batch, "epoch": epoch, "batch_in_epoch": index, "step": state.step}
        line = json.dumps(facts | {"reason": reason, "sample_ids": order.global_batch(epoch, index).tolist()}) + "\n"
        with in_one_sentence("write", self._log), open(self._log, "a+", encoding="utf-8") as file:
            file.seek(0)
            if line not in file:
                file.write(line)


def _is_before(line: str, state: TrainState) -> bool:
    try:
        facts = json.loads(line)
        return facts["batch"] < state.batch or facts["batch"] in state.passed_over
    except (ValueError, KeyError, TypeError):  # cut by a kill
        return False
