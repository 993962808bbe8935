"""What is due after an update: log, end of epoch, evaluation, checkpoint; each goes by step or by epoch."""

import math
import time

from trainer.evaluate import EvalResult
from trainer.job import Job
from trainer.optim import averaged_tensors


def at_boundary(job: Job) -> bool:
    """Do what is due after the last update. Called by all ranks. Returns False if the run is to stop instead: then
    nothing was done, and all of it is still due."""
    state, config = job.state, job.config
    was_applied = state.skipped_in_a_row == 0
    ends_epoch = state.batch_in_epoch == job.order.batches_per_epoch
    ends = job.is_at_end()

    def due(every_steps: int | None, every_epochs: int | None = None) -> bool:
        by_step = every_steps is not None and was_applied and state.step % every_steps == 0
        return by_step or (ends_epoch and every_epochs is not None and (state.epoch + 1) % every_epochs == 0)

    evaluates = ends or due(config.eval.every_steps, config.eval.every_epochs)
    saves = ends or job.agreed.save or due(config.checkpoint.every_steps, config.checkpoint.every_epochs)
    if evaluates and not evaluate(job):
        return False
    state.boundary_pending = False
    if due(config.log.every_steps) or ends:
        log_point(job)
    if ends_epoch:
        end_epoch(job)
    is_best = log_evaluation(job) if evaluates else False
    if saves or is_best:
        job.save(job, is_best)
        job.clock.last_save = time.monotonic()
    return True


def end_epoch(job: Job) -> None:
    """Show the epoch's mean training loss and go to the next one."""
    state = job.state
    reduce_window(job)
    samples = min(state.batch_in_epoch * job.order.global_batch_size, job.order.num_samples)
    mean = state.epoch_loss_sum / samples
    job.console.line(f"epoch {state.epoch + 1}  step {state.step}/{job.total_steps}  mean training loss {mean:.4f}")
    state.epoch_loss_sum = 0.0
    state.epoch, state.batch_in_epoch = state.epoch + 1, 0


def reduce_window(job: Job) -> None:
    """Add the ranks' training losses since the last time to the state. One collective."""
    total = job.window.reduce()
    job.state.loss_sum += total
    job.state.epoch_loss_sum += total


def log_point(job: Job) -> None:
    """Write the means since the last log point. Waits for the device, as do saving and evaluation; a step does not."""
    state, clock = job.state, job.clock
    reduce_window(job)
    if state.loss_count:
        state.last_train_loss = state.loss_sum / state.loss_count
    state.loss_sum, state.loss_count = 0.0, 0
    metrics = {"optim/lr": job.lr()}
    if state.last_train_loss is not None:
        metrics["train/loss"] = state.last_train_loss
    if job.grad_norm is not None:
        metrics["optim/grad_norm"] = float(job.grad_norm)
        job.grad_norm = None
    if clock.busy_s:
        metrics["perf/images_per_sec"] = clock.samples / clock.busy_s
        metrics["perf/data_wait_fraction"] = clock.data_wait_s / clock.busy_s
    if clock.checkpoint_stall_s:
        metrics["perf/checkpoint_stall_s"] = clock.checkpoint_stall_s
        clock.checkpoint_stall_s = 0.0
    if job.context.scaler is not None:
        metrics |= {"fp16/scale": job.fp16_scale(), "fp16/skipped": float(state.skipped)}
    job.tracker.log(state.step, metrics)
    clock.busy_s, clock.data_wait_s, clock.samples = 0.0, 0.0, 0


def evaluate(job: Job) -> bool:
    """Evaluate the weights and, where there is one, their EMA: the one that is judged comes last.

    Returns False if a stop was agreed on in the middle.
    """
    weights = {"": averaged_tensors(job.model)} | ({} if job.ema is None else {"ema_": job.ema.tensors})
    results: dict[str, EvalResult] = {}
    for prefix, tensors in weights.items():
        result = job.evaluator.evaluate(job.context, tensors, job.stop)
        if result is None:
            return False
        results[prefix] = result
    job.evaluations = results
    return True


def log_evaluation(job: Job) -> bool:
    """Show and log the evaluation. Returns whether this is the best so far."""
    state = job.state
    metrics: dict[str, float] = {}
    for prefix, result in job.evaluations.items():
        metrics |= result.metrics(prefix)
        job.console.line(f"step {state.step}  {result.describe('EMA' if prefix else '')}")
        if not math.isfinite(result.loss):
            job.console.line("warning: the evaluation's loss is not finite; look at the test split and the network")
    job.tracker.log(state.step, metrics)
    judged = list(job.evaluations.values())[-1].top1
    if judged <= state.best_top1:
        return False
    state.best_top1, state.best_step = judged, state.step
    return True
