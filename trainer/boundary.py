"""What is due after an update: log, end of epoch, evaluation, checkpoint; each goes by step or by epoch."""

import math
import time

from configs.beat import BOUNDARY, DATA, EVALUATION, SAVING
from configs.derive import counted
from trainer import waiting
from trainer.evaluate import EvalResult
from trainer.job import Job
from trainer.optim import averaged_tensors
from trainer.snapshot import save
from trainer.speed import speed_of
from trainer.tensors import check_after_first_batch

SAVES_FIRST_STEP = ["cuda"]
"""Devices that run out of memory in the first step, if at all: a checkpoint after it is what a restart goes on from."""


def at_boundary(job: Job) -> bool:
    """Do what is due after the last update. Called by all ranks. Returns False if the run is to stop instead: then
    nothing was done, and all of it is still due."""
    state, config = job.state, job.config
    if state.batch < job.quiet_until and not job.agreed.save:
        return True
    if not job.has_checked_tensors:
        check_after_first_batch(job)
        job.has_checked_tensors = True
    was_applied = state.skipped_in_a_row == 0
    ends_epoch = state.batch_in_epoch == job.order.batches_per_epoch
    ends = job.is_at_end()

    def due(every_steps: int | None, every_epochs: int | None = None) -> bool:
        by_step = every_steps is not None and was_applied and state.step % every_steps == 0
        return by_step or (ends_epoch and every_epochs is not None and (state.epoch + 1) % every_epochs == 0)

    evaluates = ends or due(config.eval.every_steps, config.eval.every_epochs)
    saves = ends or job.agreed.save or due(config.checkpoint.every_steps, config.checkpoint.every_epochs)
    saves = saves or (was_applied and saves_first_step(job, state.step))
    if evaluates and not evaluate(job):
        return False
    state.boundary_pending = False
    if evaluates and judge_progress(job):
        ends = saves = True
    if due(config.log.every_steps) or (ends and state.step != state.logged_step):
        log_point(job)
    if ends_epoch:
        end_epoch(job)
    is_best = log_evaluation(job) if evaluates else False
    if saves or is_best:
        save(job, is_best=is_best)
        job.clock.last_save = time.monotonic()
    job.quiet_until = state.batch + steps_until_due(job)
    return True


def steps_until_due(job: Job) -> int:
    """Updates on full batches before anything may be due again, the last of them included."""
    state, config = job.state, job.config
    intervals = (config.log.every_steps, config.eval.every_steps, config.checkpoint.every_steps)
    left = [every - state.step % every for every in intervals if every is not None]
    left.append(job.order.num_samples // job.order.global_batch_size - state.batch_in_epoch)
    left += [] if config.max_steps is None else [config.max_steps - state.step]
    return 1 if saves_first_step(job, state.step + 1) else min(left)


def saves_first_step(job: Job, step: int) -> bool:
    """Whether `step` is the run's first and a checkpoint is due for that alone."""
    return step == 1 and job.context.device.type in SAVES_FIRST_STEP


def end_epoch(job: Job) -> None:
    """Show the epoch's mean training loss and go to the next one."""
    state = job.state
    reduce_window(job)
    mean = state.epoch_loss_sum / max(1, state.epoch_loss_count)
    job.console.line(f"epoch {state.epoch + 1}  step {state.step}/{job.total_steps}  mean training loss {mean:.4f}")
    state.epoch_loss_sum, state.epoch_loss_count = 0.0, 0
    state.epoch, state.batch_in_epoch = state.epoch + 1, 0


def reduce_window(job: Job) -> None:
    """Add the ranks' training losses since the last time to the state. One collective."""
    total = job.window.reduce()
    job.state.loss_sum += total
    job.state.epoch_loss_sum += total


def log_point(job: Job) -> None:
    """Write the means since the last log point. Waits for the device, as do saving and evaluation; a step does not."""
    state, clock, account = job.state, job.clock, job.account
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
    busy_s, data_wait_s, stall_s = account.busy_s(), account.seconds[DATA], account.seconds[SAVING]
    if seconds := busy_s - clock.busy_s:
        rate = (state.samples_seen - clock.samples) / seconds
        metrics["perf/images_per_sec"] = rate
        metrics["perf/data_wait_fraction"] = share = (data_wait_s - clock.data_wait_s) / seconds
        if busy_s >= waiting.NOT_BEFORE_S and not clock.told_of_wait:
            clock.told_of_wait = waiting.tell_of_wait(job, share, rate)
        metrics |= {} if (speed := speed_of(job)) is None else speed.metrics(rate)
    if stall_s > clock.stall_s:
        metrics["perf/checkpoint_stall_s"] = stall_s - clock.stall_s
    if job.context.scaler is not None:
        metrics |= {"fp16/scale": job.fp16_scale(), "fp16/skipped": float(state.skipped)}
    if job.guard.policy == "skip":
        metrics["guard/dropped"] = float(state.dropped)
    job.tracker.log(state.step, metrics)
    state.logged_step = state.step
    clock.busy_s, clock.data_wait_s, clock.stall_s = busy_s, data_wait_s, stall_s
    clock.samples = state.samples_seen


def evaluate(job: Job) -> bool:
    """Evaluate the weights and, where there is one, their EMA: the one that is judged comes last.

    Returns False if a stop was agreed on in the middle.
    """
    job.account.enter(EVALUATION)
    weights = {"": averaged_tensors(job.model)} | ({} if job.ema is None else {"ema_": job.ema.tensors})
    results: dict[str, EvalResult] = {}
    in_detail = job.is_at_end() or job.config.early_stopping.patience is not None  # it may be the last
    for prefix, tensors in weights.items():
        result = job.evaluator.evaluate(job.context, tensors, job.stop, job.account.beat, in_detail=in_detail)
        if result is None:
            return False
        results[prefix] = result
    job.evaluations = results
    job.account.enter(BOUNDARY)
    return True


def judge_progress(job: Job) -> bool:
    """Whether the run ends here because its evaluations got no better. All ranks hold the same results."""
    state, config = job.state, job.config.early_stopping
    judged = list(job.evaluations.values())[-1]
    value = -judged.loss if config.metric == "eval/loss" else judged.metrics("", in_detail=True)[config.metric]
    if state.early_best is None or value > state.early_best + config.min_delta:
        state.early_best, state.evaluations_without_better = value, 0
        return False
    state.evaluations_without_better += 1
    if not job.stops_early():
        return False
    by = f" by more than {config.min_delta:g}" if config.min_delta else ""
    job.console.line(
        f"stops early at step {state.step}: {config.metric} was no better than {abs(state.early_best):.4f}{by} "
        f"in {counted(state.evaluations_without_better, 'evaluation')} (early_stopping.patience)"
    )
    return True


def log_evaluation(job: Job) -> bool:
    """Show and log the evaluation. Returns whether this is the best so far."""
    state = job.state
    metrics: dict[str, float] = {}
    for prefix, result in job.evaluations.items():
        metrics |= result.metrics(prefix, in_detail=job.config.early_stopping.metric == "eval/balanced_accuracy")
        job.console.line(f"step {state.step}  {result.describe('EMA' if prefix else '')}")
        if not math.isfinite(result.loss):
            job.console.line("warning: the evaluation's loss is not finite; look at the test split and the network")
    job.tracker.log(state.step, metrics)
    judged = list(job.evaluations.values())[-1].top1
    if judged <= state.best_top1:
        return False
    state.best_top1, state.best_step = judged, state.step
    return True
