"""How an update went, known to all ranks alike: counted, dropped, gone back for, or the end of the run."""

import math

from configs.errors import TrainingError
from trainer.agreement import Agreed, agreed_from
from trainer.boundary import saves_first_step
from trainer.data.order import RankBatch
from trainer.guard import BadBatchError
from trainer.job import Job, Pending
from trainer.snapshot import first_bad_parameter

# A scale that was halved this often in a row will not recover: 65536 is 0.002 by then.
MAX_SKIPPED_IN_A_ROW = 25


def must_settle(job: Job, batch: RankBatch) -> bool:
    """Whether something may be due after this update, so that its outcome is wanted now. Always where that is free."""
    assert job.pending is not None
    # Only what all ranks know in common may decide, or they would stop at different steps.
    if job.pending.outcome.is_ready or job.agreed.stop or job.agreed.save:
        return True
    step, config = job.state.step + 1, job.config
    intervals = (config.log.every_steps, config.eval.every_steps, config.checkpoint.every_steps)
    ends = step == config.max_steps or batch.index == job.order.batches_per_epoch - 1
    return ends or saves_first_step(job, step) or any(every is not None and step % every == 0 for every in intervals)


def settle(job: Job) -> None:
    """Read how the last update went and count it; act on a bad batch; stop if nothing is applied any more."""
    pending, state = job.pending, job.state
    if pending is None:
        return
    job.pending = None
    if not pending.outcome.is_ready:
        job.agreed = agreed_by(job, pending.outcome.read(), pending.num_samples)
    if pending.flag is not None and pending.flag.read()[0]:
        settle_bad(job, pending)
        return
    job.guard.note_loss(job.agreed.loss, state)
    applied = pending.applied is None or bool(pending.applied.read()[0])
    state.count(applied=applied, num_samples=pending.num_samples)
    state.loss_count += pending.num_samples
    state.epoch_loss_count += pending.num_samples
    if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise TrainingError(
            f"{state.skipped_in_a_row} updates in a row overflowed in fp16 at step {state.step} (batch {state.batch}, "
            f"lr {pending.lr:g}, scale {job.fp16_scale():g}); use mixed_precision: bf16 or no, or a lower optim.lr"
        )


def settle_bad(job: Job, pending: Pending) -> None:
    """A bad batch left everything as it was: count it as dropped, or end, or go back, as the settings say."""
    if job.guard.policy == "stop":
        raise bad_loss(job, pending.lr)
    reason = job.guard.reason(job.agreed, job.state)
    if job.guard.policy == "rollback":
        raise BadBatchError(reason)
    job.state.count(applied=False, num_samples=pending.num_samples)
    job.grad_norm = None
    job.console.line(job.guard.drop(job.state, reason, job.order))


def agreed_by(job: Job, values: list[float], num_samples: int) -> Agreed:
    """What an outcome says: the ranks' reduced signals, or of one process its summed loss."""
    if job.signals is not None or job.shards is not None:
        return agreed_from(values)
    bad = () if math.isfinite(values[0]) else (0,)
    return Agreed(job.stop.is_set, job.wants_save(), bad, values[0] / num_samples)


def bad_loss(job: Job, lr: float) -> TrainingError:
    """What all ranks raise when the loss of any was not finite, or a spike."""
    precision = "" if job.context.precision == "no" else ", mixed_precision: no"
    advice = f"use a lower optim.lr, optim.max_grad_norm{precision}, or nonfinite: skip or rollback"
    if not job.agreed.bad_ranks:
        reason = job.guard.reason(job.agreed, job.state)
        return TrainingError(f"stopped at step {job.state.step}: {reason} (lr {lr:g}); {advice}")
    ranks = ", ".join(str(rank) for rank in job.agreed.bad_ranks)
    scale = "" if job.context.scaler is None else f", scale {job.fp16_scale():g}"
    bad = first_bad_parameter(job)
    where = f"; first parameter that is not finite: {bad}" if bad else ""
    return TrainingError(
        f"the loss is not finite at step {job.state.step} on rank {ranks} (lr {lr:g}{scale}){where}; {advice}"
    )
