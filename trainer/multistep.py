"""`steps_per_execution`: several updates in one compiled call, between two points at which anything may be due."""

import contextlib
import copy
from collections.abc import Iterator
from operator import itemgetter

import torch
from torch import Tensor

from configs.beat import COMPUTE, UPDATE
from configs.derive import counted, lr_at
from configs.errors import ConfigError
from trainer.boundary import steps_until_due
from trainer.data.order import RankBatch
from trainer.data.resident import ResidentSource
from trainer.job import Job
from trainer.memory import told_if_out_of_memory
from trainer.models import random_layers
from trainer.outcome import agreed_by, bad_loss
from trainer.unrolled import Unrolled, rates_of


def check_multistep(job: Job) -> None:
    """Raise one ConfigError with all that several updates in one call cannot do, or if there would be no such call."""
    config, model = job.config, job.model
    reasons = {
        f"{job.context.world_size} processes": job.context.world_size > 1,
        "virtual_shards": job.shards is not None,
        "compile": config.compile is not False,
        "fp16": job.context.scaler is not None,
        "ema": job.ema is not None,
        "nonfinite: skip or rollback, or guard.spike_factor": job.guard.is_on,
        "accumulation (max_per_device_batch_size)": job.shards is None
        and job.context.world_size * job.order.max_micro_batch < job.order.global_batch_size,
        "data that are not resident": not isinstance(job.source, ResidentSource),
        "layers with buffers, such as BatchNorm": any(True for _ in model.buffers()),
        "mixup or cutmix": job.mixing is not None,
        "loss.teacher": job.teacher is not None,
        f"optim.name: {config.optim.name}": config.optim.name not in ("sgd", "adam", "adamw"),
        "optim.layer_decay": config.optim.layer_decay != 1.0,
        "optim.norm_and_bias_lr": config.optim.norm_and_bias_lr != 1.0,
        "model.checkpointing": config.model.checkpointing,
        "dropout, or other random numbers that the network draws": bool(random_layers(model)) or _draws(job),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        many = config.steps_per_execution
        raise ConfigError(f"steps_per_execution={many} does not go with {'; '.join(found)}; use steps_per_execution=1")
    _check_intervals(job)


def _draws(job: Job) -> bool:
    """Whether a forward pass in training moves torch's generators: what functions draw cannot be told by layers."""
    if not job.may_draw:
        return False
    model, shape = copy.deepcopy(job.model).train(), (2, *job.image_shape)
    with torch.random.fork_rng(), torch.no_grad():
        before = _generators(job)
        model(torch.zeros(shape, dtype=job.context.dtype, device=job.context.device))
        return any(not one.equal(other) for one, other in zip(before, _generators(job), strict=True))


def _generators(job: Job) -> list[Tensor]:
    on_gpu = [torch.cuda.get_rng_state(job.context.device)] if job.context.device.type == "cuda" else []
    return [torch.get_rng_state(), *on_gpu]


def _check_intervals(job: Job) -> None:
    """A group is taken where nothing is due before its end; raise ConfigError if that is nowhere."""
    config, full = job.config, job.order.num_samples // job.order.global_batch_size
    intervals = {
        "log.every_steps": config.log.every_steps,
        "eval.every_steps": config.eval.every_steps,
        "checkpoint.every_steps": config.checkpoint.every_steps,
        "max_steps": config.max_steps,
        "full batches in an epoch": full,
    }
    (name, shortest) = min(((name, every) for name, every in intervals.items() if every is not None), key=itemgetter(1))
    if config.steps_per_execution > shortest:
        raise ConfigError(
            f"steps_per_execution={config.steps_per_execution} would never be: something is due after "
            f"{counted(shortest, 'update')} ({name}); use {shortest} or less, or a longer interval"
        )


def told_if_group_too_large(job: Job) -> contextlib.AbstractContextManager[None]:
    """Where a restart with smaller micro-batches, which groups do not go with, would be of no help."""
    count = job.config.steps_per_execution
    fix = "use a smaller steps_per_execution or global_batch_size"
    return told_if_out_of_memory(f"with {count} updates in one call", fix) if count > 1 else contextlib.nullcontext()


class MultiStep:
    """Groups of `count` updates."""

    def __init__(self, job: Job) -> None:
        """Of a job that check_multistep() has let pass."""
        self.count = job.config.steps_per_execution
        autocast = job.context.precision == "bf16"
        self._run = Unrolled(job.model, job.loss_sum, job.optimizer, job.config.optim, autocast=autocast)

    def take(self, job: Job, order: Iterator[RankBatch]) -> bool:
        """Make the next group of updates, if nothing is due before its end. Returns whether it did.

        Where a group begins follows from the run's position alone, so a resume makes the same ones."""
        if steps_until_due(job) < self.count:
            return False
        job.account.begin_step()
        batches = [next(order) for _ in range(self.count)]
        ids = torch.cat([batch.pieces[0] for batch in batches])
        assert isinstance(job.source, ResidentSource)
        images, labels = job.source.gather(ids)
        job.account.enter(COMPUTE)
        draws = torch.cat([batch.draws[0] for batch in batches])
        images = job.preprocess.for_training(images, batches[0].epoch, draws)
        if job.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        images = images.unflatten(0, (self.count, -1))
        labels = labels.unflatten(0, (self.count, -1))
        self._note(job, batches, images, labels)
        step, per_epoch = job.state.step, job.order.batches_per_epoch
        lrs = [lr_at(step + k, job.config, per_epoch) for k in range(self.count)]
        losses, landed, norm = self._run(images, labels, rates_of(job.config.optim, lrs, step, images))
        job.account.enter(UPDATE)
        self._count(job, losses.tolist(), landed.tolist(), batches[0].size, lrs)
        job.grad_norm = norm
        job.account.end_step(job.state.step)
        job.console.progress(job.state.step, job.total_steps, job.state.epoch, job.state.last_train_loss)
        return True

    def _note(self, job: Job, batches: list[RankBatch], images: Tensor, labels: Tensor) -> None:
        """Write which samples are trained on, and let faults happen: those of the whole group before it."""
        for k, batch in enumerate(batches):
            if job.faults is not None:
                ((images[k], _),) = job.faults.strike(job.state.step + k, [(images[k], labels[k])])
            if job.samples is not None:
                job.samples.write(job.state.batch + k, batch.pieces)

    def _count(self, job: Job, losses: list[float], landed: list[bool], size: int, lrs: list[float]) -> None:
        """Count the updates that landed. Raises TrainingError at the first that did not."""
        state, done = job.state, sum(landed)
        for loss in losses[:done]:
            state.count(applied=True, num_samples=size)
            state.loss_count += size
            state.epoch_loss_count += size
            job.window.add(loss)
        for entries in job.optimizer.state.values():
            if "step" in entries:
                entries["step"] += done
        job.agreed = agreed_by(job, [losses[min(done, self.count - 1)]], size)
        if done < self.count:
            raise bad_loss(job, lrs[done])
