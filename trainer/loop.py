"""The training loop: one step, and stopping. Reads top to bottom; what is due between steps is in boundary.py."""

import contextlib
import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from configs.errors import ConfigError, TrainingError
from trainer.agreement import Agreed, HostCopy, agreed_from, signal_values
from trainer.boundary import at_boundary
from trainer.data.order import RankBatch
from trainer.evaluate import evaluation_mode
from trainer.faults import Pieces
from trainer.job import Job, Pending
from trainer.optim import apply_update

# A scale that was halved this often in a row will not recover: 65536 is 0.002 by then.
MAX_SKIPPED_IN_A_ROW = 25


def train(job: Job) -> bool:
    """Train to the end, or to a stop that all ranks agreed on. Returns whether the run is finished."""
    state = job.state
    if state.boundary_pending and not at_boundary(job):
        return stop_here(job)
    if job.context.world_size > 1 and not job.is_finished():
        settle_buckets(job)
    job.module.train()
    batches = job.source.training(job.order.batches(state.epoch, state.batch_in_epoch))
    while not job.is_finished():
        take_step(job, batches)
        if job.pending is not None:
            continue
        stops = job.agreed.stop and not job.is_at_end()
        if stops or not at_boundary(job):
            return stop_here(job)
    return True


def stop_here(job: Job) -> bool:
    """Save with all that is due after the last update still to be done; the run is not finished."""
    job.state.boundary_pending = True
    job.save(job, False)
    return False


def take_step(job: Job, batches: Iterator[tuple[RankBatch, Pieces]]) -> None:
    """Fetch one global batch, update on it, and count the update once its outcome is known."""
    start = time.perf_counter()
    batch, pieces = next(batches)
    job.clock.data_wait_s += time.perf_counter() - start
    if job.faults is not None:
        pieces = job.faults(job.state.step, pieces)
    train_step(job, batch, pieces)
    if _must_settle(job, batch):
        settle(job)
    job.clock.busy_s += time.perf_counter() - start
    job.clock.samples += batch.size
    job.console.progress(job.state.step, job.total_steps, job.state.epoch, job.state.last_train_loss)


def train_step(job: Job, batch: RankBatch, pieces: Pieces) -> None:
    """Forward and backward over this rank's micro-batches, then one update on the mean over the global batch."""
    context, loss = job.context, None
    factor = gradient_factor(job, batch)
    batch_number = batch.epoch * job.order.batches_per_epoch + batch.index
    for index, (images, labels) in enumerate(pieces):
        context.seed_dropout(job.config.seed, batch_number, index)
        is_last = index == len(pieces) - 1
        with context.no_sync(job.module, when=not is_last):
            piece_loss, signals = forward(job, batch, images, labels, batch.pieces[index])
            loss = piece_loss.detach() if loss is None else loss + piece_loss.detach()
            if signals is None or not is_last:
                piece_loss.backward(factor)
            else:
                own_loss = torch.zeros_like(loss) if batch.is_dummy else loss
                values = signal_values(signals, context.rank, own_loss, stop=job.stop.is_set, save=job.wants_save())
                torch.autograd.backward([piece_loss, signals], [factor, values])
    assert loss is not None
    outcome = HostCopy(loss if job.signals is None else reduced_signals(job))
    settle(job)
    on_host = None
    if outcome.is_ready:
        found = outcome.read()
        job.agreed = agreed_by(job, found)
        if job.agreed.bad_ranks:
            raise bad_loss(job, job.lr())
        on_host = found[0] if job.signals is None else None
    if not batch.is_dummy:
        job.window.add(loss, on_host)
    update(job, batch.size, outcome)


def reduced_signals(job: Job) -> Tensor:
    assert job.signals is not None
    assert job.signals.grad is not None, "the backward pass reached the signals"
    return job.signals.grad


def gradient_factor(job: Job, batch: RankBatch) -> Tensor:
    """What turns the gradient of a rank's summed loss into its share of the global mean's, times the fp16 scale.

    DDP averages over the ranks: world size / samples of the global batch is right whatever the slices are.
    """
    context = job.context
    weight = 0.0 if batch.is_dummy else context.world_size / batch.size
    factor = torch.full((), weight, dtype=context.dtype, device=context.device)
    return factor if context.scaler is None else context.scaler.scale(factor)


def forward(job: Job, batch: RankBatch, images: Tensor, labels: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Summed loss of one micro-batch, and the signals' parameter where there are several ranks."""
    images = job.preprocess.for_training(images, batch.epoch, ids)
    if job.config.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    if batch.is_dummy:
        with evaluation_mode(job.module), job.context.autocast(), _eagerly(job):
            output = job.module(images)
    elif batch.size < job.order.global_batch_size:
        with job.context.autocast(), _eagerly(job):
            output = job.module(images)
    else:
        with job.context.autocast():
            output = job.module(images)
    logits, signals = output if job.signals is not None else (output, None)
    return job.loss_sum(logits if logits.dtype == torch.float64 else logits.float(), labels), signals


def _eagerly(job: Job) -> contextlib.AbstractContextManager[object]:
    """Uncompiled inside: for the odd batch, whose size to compile for would cost more than it saves."""
    if not job.config.compile:
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def update(job: Job, num_samples: int, outcome: HostCopy) -> None:
    """One update with the reduced gradient; its outcome is settled later."""
    lr, step, optim = job.lr(), job.state.step + 1, job.config.optim
    wants_norm = step % job.config.log.every_steps == 0 or step == job.total_steps
    result = apply_update(job.optimizer, job.context.scaler, lr, optim.max_grad_norm, want_grad_norm=wants_norm)
    job.grad_norm = result.grad_norm if result.grad_norm is not None else job.grad_norm
    for parameter in job.parameters:
        parameter.grad = None
    if job.ema is not None:
        job.ema.update(num_samples, job.state.samples_seen + num_samples, result.applied)
    applied = None if result.applied is None else HostCopy(result.applied)
    job.pending = Pending(applied, outcome, lr, num_samples)


def settle(job: Job) -> None:
    """Read how the last update went and count it; stop all ranks if its loss was bad or nothing is applied any more."""
    pending, state = job.pending, job.state
    if pending is None:
        return
    job.pending = None
    if not pending.outcome.is_ready:
        job.agreed = agreed_by(job, pending.outcome.read())
        if job.agreed.bad_ranks:
            raise bad_loss(job, pending.lr)
    applied = pending.applied is None or bool(pending.applied.read()[0])
    state.count(applied=applied, num_samples=pending.num_samples)
    state.loss_count += pending.num_samples
    if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise TrainingError(
            f"{state.skipped_in_a_row} updates in a row overflowed in fp16 at step {state.step} (batch {state.batch}, "
            f"lr {pending.lr:g}, scale {job.fp16_scale():g}); use mixed_precision: bf16 or no, or a lower optim.lr"
        )


def agreed_by(job: Job, values: list[float]) -> Agreed:
    """What an outcome says: the ranks' reduced signals, or of one process the loss."""
    if job.signals is not None:
        return agreed_from(values)
    return Agreed(job.stop.is_set, job.wants_save(), () if math.isfinite(values[0]) else (0,))


def bad_loss(job: Job, lr: float) -> TrainingError:
    """What all ranks raise when the loss of any was not finite."""
    ranks = ", ".join(str(rank) for rank in job.agreed.bad_ranks)
    scale = "" if job.context.scaler is None else f", scale {job.fp16_scale():g}"
    bad = _first_bad_parameter(job)
    where = f"; first parameter that is not finite: {bad}" if bad else ""
    return TrainingError(
        f"the loss is not finite at step {job.state.step} on rank {ranks} (lr {lr:g}{scale}){where}; "
        "use a lower optim.lr, optim.max_grad_norm, or mixed_precision: bf16 or no"
    )


def stop_if_weights_bad(job: Job) -> None:
    """Raise TrainingError rather than save weights that are not finite. They are equal on all ranks."""
    # One pass without temporaries. A sum that is finite has no term that is not; one that is not may only be too large.
    sums = torch.stack([parameter.detach().sum().isfinite() for parameter in job.model.parameters()])
    bad = None if bool(sums.all()) else _first_bad_parameter(job)
    if bad is None:
        return
    raise TrainingError(
        f"the weights are not finite at step {job.state.step} (lr {job.lr():g}), first {bad}; "
        "they are not saved, the last checkpoint stands; use a lower optim.lr or optim.max_grad_norm"
    )


def _first_bad_parameter(job: Job) -> str | None:
    return next((name for name, tensor in job.model.named_parameters() if not bool(tensor.isfinite().all())), None)


def settle_buckets(job: Job) -> None:
    """One backward pass of weight zero. DDP lays its buckets out anew after the first one; with that behind us, sums
    are taken in the same order after a resume as without it."""
    images = torch.zeros(1, *job.image_shape, dtype=job.context.dtype, device=job.context.device)
    with evaluation_mode(job.module), job.context.autocast(), _eagerly(job):
        logits, signals = job.module(images)
    (logits.float().sum() * 0 + signals.sum() * 0).backward()
    unused = [name for name, p in job.model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        raise ConfigError(
            f"{', '.join(unused[:5])} took no part in the network's answer, and several processes need all to; "
            "remove them or set requires_grad to False"
        )
    for parameter in job.parameters:
        parameter.grad = None


def _must_settle(job: Job, batch: RankBatch) -> bool:
    """Whether something may be due after this update, so that its outcome is wanted now. Always where that is free."""
    assert job.pending is not None
    # Only what all ranks know in common may decide, or they would stop at different steps.
    if job.pending.outcome.is_ready or job.agreed.stop or job.agreed.save:
        return True
    step, config = job.state.step + 1, job.config
    intervals = (config.log.every_steps, config.eval.every_steps, config.checkpoint.every_steps)
    ends = step == config.max_steps or batch.index == job.order.batches_per_epoch - 1
    return ends or any(every is not None and step % every == 0 for every in intervals)
