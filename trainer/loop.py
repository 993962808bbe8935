"""The training loop: one step, and stopping. Reads top to bottom; what is due between steps is in boundary.py."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from configs.beat import BOUNDARY, COMPUTE, UPDATE, WAITING
from configs.errors import ConfigError
from trainer.agreement import Agreed, HostCopy, bad_and_loss, signal_values
from trainer.backward import backward
from trainer.boundary import at_boundary
from trainer.data.order import RankBatch
from trainer.evaluate import evaluation_mode
from trainer.faults import Pieces
from trainer.freeze import in_evaluation
from trainer.job import Job, Pending
from trainer.multistep import MultiStep
from trainer.optim import apply_update
from trainer.outcome import agreed_by, bad_loss, must_settle, settle
from trainer.snapshot import save


def train(job: Job) -> bool:
    """Train to the end, or to a stop that all ranks agreed on. Returns whether the run is finished."""
    state, job.quiet_until = job.state, 0
    if state.boundary_pending and not at_boundary(job):
        return stop_here(job)
    if job.signals is not None and not job.is_finished():
        settle_buckets(job)
    job.module.train()
    in_evaluation(job.frozen_norms)
    order = job.order.batches(state.epoch, state.batch_in_epoch)
    batches = job.source.training(order)
    multistep = MultiStep(job) if job.config.steps_per_execution > 1 else None
    while not job.is_finished():
        if multistep is None or not multistep.take(job, order):
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
    save(job)
    return False


def take_step(job: Job, batches: Iterator[tuple[RankBatch, Pieces]]) -> None:
    """Fetch one global batch, update on it, and count the update once its outcome is known."""
    job.account.begin_step()
    batch, pieces = next(batches)
    if number_of(job, batch) in job.state.passed_over:
        pass_over(job, batch)
        return
    job.account.enter(COMPUTE)
    if job.faults is not None:
        pieces = job.faults.strike(job.state.step + (job.pending is not None), pieces)
    if job.samples is not None:
        job.samples.write(number_of(job, batch), [] if batch.is_dummy else batch.pieces)
    train_step(job, batch, pieces)
    if must_settle(job, batch):
        settle(job)
    job.account.end_step(job.state.step + (job.pending is not None))
    job.console.progress(job.state.step, job.total_steps, job.state.epoch, job.state.last_train_loss)


def train_step(job: Job, batch: RankBatch, pieces: Pieces) -> None:
    """Forward and backward over this rank's micro-batches, then one update on the mean over the global batch."""
    context, loss = job.context, None
    factor, batch_number = gradient_factor(job, batch), number_of(job, batch)
    job.guard.remember()
    for index, (images, labels) in enumerate(pieces):
        if index:
            job.account.enter(COMPUTE)
        if job.shards is not None:
            job.shards.begin(batch, index)
        if job.may_draw:
            context.seed_dropout(job.config.seed, batch_number, *batch.parts[index])
        is_last = index == len(pieces) - 1
        with context.no_sync(job.module, when=not is_last):
            piece_loss, signals = forward(job, batch, images, labels, batch.draws[index])
            loss = piece_loss.detach() if loss is None else loss + piece_loss.detach()
            if signals is None or not is_last:
                backward((piece_loss,), (factor,))
            else:
                own_loss = torch.zeros_like(loss) if batch.is_dummy else loss
                values = own_signals(job, signals, own_loss, context.world_size / batch.size)
                backward((piece_loss, signals), (factor, values))
        if job.shards is not None:
            job.shards.end(batch, index, piece_loss.detach())
    if job.shards is not None:
        loss = reduce_shards(job, batch, loss, factor)
    assert loss is not None
    job.account.enter(UPDATE)
    signals = reduced_signals(job)
    outcome = HostCopy(loss if signals is None else signals)
    settle(job)
    flag = flag_bad(job, loss, batch.size) if job.guard.is_on or not outcome.is_ready else None
    on_host = None
    if outcome.is_ready:
        found = outcome.read()
        job.agreed = agreed_by(job, found, batch.size)
        if flag is None and (job.agreed.bad_ranks or not has_finite_gradients(job)):
            raise bad_loss(job, job.lr())
        on_host = found[0] if signals is None and flag is None else None
    if not batch.is_dummy and (job.shards is None or context.is_rank_zero):
        on_device = loss if flag is None else torch.where(flag > 0, 0.0, loss)
        job.window.add(on_device if on_host is None else on_host)
    update(job, batch.size, outcome, flag)


def own_signals(job: Job, signals: Tensor, loss: Tensor, loss_factor: float | None) -> Tensor:
    """What this rank has to tell the others with its gradients. `loss_factor` is without fp16's scale, which nobody
    takes from the signals."""
    per_loss = loss_factor if job.guard.is_on else None
    stop, saves = job.stop.is_set, job.wants_save()
    return signal_values(signals, job.context.rank, loss, stop=stop, save=saves, loss_factor=per_loss)


def reduce_shards(job: Job, batch: RankBatch, own_loss: Tensor | None, factor: Tensor) -> Tensor:
    """Sum the virtual shards of all ranks; returns the loss of the whole batch."""
    assert job.shards is not None
    job.account.enter(WAITING)
    own = torch.zeros_like(factor) if own_loss is None else own_loss
    return job.shards.reduce(batch, own_signals(job, job.shards.signals, own, None))


def has_finite_gradients(job: Job) -> bool:
    """Of all ranks, whose gradients are equal by now. With fp16 the scaler asks, and overflows are its business."""
    gradients = gradients_to_check(job)
    # A finite sum has finite terms only, and is had in half the time; that of large ones may overflow.
    total = 0.0
    for gradient in gradients:
        total += gradient.sum().item()
    if math.isfinite(total):
        return True
    return not bool(job.guard.not_finite(gradients))


def gradients_to_check(job: Job) -> list[Tensor]:
    return [] if job.context.scaler is not None else [p.grad for p in job.parameters if p.grad is not None]


def number_of(job: Job, batch: RankBatch) -> int:
    """Number of a global batch since the start of the run."""
    return batch.epoch * job.order.batches_per_epoch + batch.index


def flag_bad(job: Job, loss: Tensor, num_samples: int) -> Tensor:
    """1 on the device if the batch is bad and must not change anything: then BatchNorm's statistics go back too."""
    signals = reduced_signals(job)
    bad, mean = (~loss.isfinite(), loss / num_samples) if signals is None else bad_and_loss(signals)
    flag = job.guard.flag(bad, mean, gradients_to_check(job), job.state)
    job.guard.restore(flag)
    return flag


def reduced_signals(job: Job) -> Tensor | None:
    """What all ranks told; None where there is one, which has the loss itself."""
    if job.shards is not None:
        return job.shards.signals
    return None if job.signals is None else job.signals.grad


def gradient_factor(job: Job, batch: RankBatch) -> Tensor:
    """What turns the gradient of a rank's summed loss into its share of the global mean's, times the fp16 scale.

    DDP averages over the ranks: world size / samples of the global batch is right whatever the slices are.
    """
    context = job.context
    ranks = context.world_size if job.shards is None else 1  # shards are summed
    weight = 0.0 if batch.is_dummy else ranks / batch.size
    factor = context.scalar(weight)
    return factor if context.scaler is None else context.scaler.scale(factor)


def forward(job: Job, batch: RankBatch, images: Tensor, labels: Tensor, draws: Tensor) -> tuple[Tensor, Tensor | None]:
    """Summed loss of one micro-batch, and the signals' parameter where there are several ranks."""
    images, targets = job.preprocess.for_training(images, batch.epoch, draws), labels
    if job.mixing is not None:
        images, targets = job.mixing(images, labels, batch.epoch, draws)
    if job.channels_last:
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
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = job.loss_sum(logits, targets)
    return loss if job.teacher is None else job.teacher.blend(loss, logits, images), signals


def _eagerly(job: Job) -> contextlib.AbstractContextManager[object]:
    """Uncompiled inside: for the odd batch, whose size to compile for would cost more than it saves."""
    if not job.is_compiled:
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def update(job: Job, num_samples: int, outcome: HostCopy, flag: Tensor | None) -> None:
    """One update with the reduced gradient; its outcome is settled later."""
    lr, step, optim = job.lr(), job.state.step + 1, job.config.optim
    wants_norm = step % job.config.log.every_steps == 0 or step == job.total_steps
    result = apply_update(
        job.optimizer, job.context.scaler, lr, optim.max_grad_norm, want_grad_norm=wants_norm, guard=flag
    )
    job.grad_norm = result.grad_norm if result.grad_norm is not None else job.grad_norm
    for parameter in job.parameters:
        parameter.grad = None
    if job.ema is not None:
        job.ema.update(num_samples, job.state.samples_seen + num_samples, result.applied)
    applied = None if result.applied is None else HostCopy(result.applied)
    job.pending = Pending(applied, outcome, lr, num_samples, None if flag is None else HostCopy(flag))


def pass_over(job: Job, batch: RankBatch) -> None:
    """Consume a batch that a rollback went back for, without training on it."""
    settle(job)
    job.account.enter(BOUNDARY)
    job.state.count(applied=False, num_samples=batch.size)
    job.agreed = Agreed(stop=False, save=False, bad_ranks=())
    job.console.line(f"passed over batch {number_of(job, batch)} at step {job.state.step}")


def settle_buckets(job: Job) -> None:
    """One backward pass of weight zero. DDP lays its buckets out anew after the first one; with that behind us, sums
    are taken in the same order after a resume as without it."""
    arrived: list[Tensor] = []
    hooks = [parameter.register_post_accumulate_grad_hook(arrived.append) for parameter in job.parameters]
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
    for hook in (*hooks, *job.last_gradient):
        hook.remove()
    if job.context.device.type == "cpu":  # on a GPU the host is far ahead: its times say nothing of who waits for whom
        job.last_gradient = [arrived[-1].register_post_accumulate_grad_hook(lambda _: job.account.enter(WAITING))]
    for parameter in job.parameters:
        parameter.grad = None
