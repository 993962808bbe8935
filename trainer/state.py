"""The position of a run: the only thing that the loop changes besides tensors."""

import dataclasses
from dataclasses import dataclass, field


@dataclass(slots=True)
class TrainState:
    """`batch == step + skipped` always; (epoch, batch_in_epoch) is the place in the data, on any world size."""

    epoch: int = 0
    batch_in_epoch: int = 0
    """Batches of this epoch that are consumed; equal to the epoch's length until the boundary is dealt with."""
    batch: int = 0
    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    samples_seen: int = 0
    boundary_pending: bool = False
    """The run was stopped after an update and before what was due then (log, evaluation, checkpoint)."""
    best_top1: float = -1.0
    best_step: int = -1
    early_best: float | None = None
    """The best value of early_stopping.metric so far."""
    evaluations_without_better: int = 0
    loss_sum: float = 0.0
    """Training loss summed over the samples since the last log point, as far as it is reduced already."""
    loss_count: int = 0
    epoch_loss_sum: float = 0.0
    epoch_loss_count: int = 0
    dropped: int = 0
    """Of `skipped`: updates left out because the batch was bad (nonfinite: skip)."""
    rollbacks: int = 0
    passed_over: list[int] = field(default_factory=list)
    """Bad batches that a rollback went back for, by their number since the start: they are consumed without update."""
    recent_losses: list[float] = field(default_factory=list)
    """Mean losses of the last good batches, where a spike is looked for."""
    last_train_loss: float | None = None
    logged_step: int = -1
    """Of the last log point: the end of the run makes no second one at the same step."""

    def count(self, *, applied: bool, num_samples: int) -> None:
        """One global batch was consumed and its update applied, or skipped (fp16 overflow)."""
        self.batch += 1
        self.batch_in_epoch += 1
        self.samples_seen += num_samples
        if applied:
            self.step += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
        assert self.batch == self.step + self.skipped

    def logged_until(self) -> int:
        """The last step whose log points are all written: not this one's, if what was due at it is still to be done."""
        return self.step - 1 if self.boundary_pending and self.skipped_in_a_row == 0 else self.step

    def as_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)
