"""Back to the newest checkpoint and past a bad batch, within one attempt."""

from pathlib import Path

from configs.beat import DATA, SAVING
from configs.errors import TrainingError
from trainer import resume
from trainer.job import Job


def roll_back(job: Job, reason: str, checkpoints: Path) -> None:
    """Restore the newest checkpoint and pass over the batch that was bad. All ranks are here at the same update.

    Raises TrainingError when that was done guard.max_rollbacks times.
    """
    bad, most = job.state, job.config.guard.max_rollbacks
    if bad.rollbacks >= most:
        raise TrainingError(f"{reason} at step {bad.step}, after {most} rollbacks (guard.max_rollbacks)")
    job.account.enter(SAVING)  # restoring may take longer than a step may
    job.guard.record("passed over", bad, bad.batch, reason, job.order)
    for parameter in job.parameters:
        parameter.grad = None
    job.grad_norm = None
    before = job.wall_s_before, job.time_before
    name = resume.resume_newest(job, checkpoints)
    # The clocks went on: what the checkpoint says of this attempt's time is in them already.
    job.wall_s_before, job.time_before = before
    job.account.step = job.state.step
    job.clock.busy_s, job.clock.data_wait_s = job.account.busy_s(), job.account.seconds[DATA]
    job.clock.stall_s = job.account.seconds[SAVING]
    job.state.rollbacks, job.state.passed_over = bad.rollbacks + 1, [*bad.passed_over, bad.batch]
    job.console.line(
        f"rollback {bad.rollbacks + 1} of {most}: {reason} on batch {bad.batch} at step {bad.step}; back to {name}"
    )
