"""From a job to a checkpoint: which tensor belongs where, and that nothing bad is saved. resume.py goes back."""

import torch
from torch import Tensor, nn

from configs.beat import BOUNDARY, SAVING
from configs.errors import TrainingError
from trainer.account import that_counts
from trainer.checkpoint import Snapshot
from trainer.job import Job
from trainer.optim import persistent_buffers

WINDOW = "window"
"""Name of the tensor with a rank's share of the loss that is not logged yet."""


def save(job: Job, *, is_best: bool = False) -> None:
    """Have a checkpoint written; waits for the one before. Called by all ranks."""
    job.account.enter(SAVING)
    job.saver.settle()
    stop_if_weights_bad(job)
    job.tracker.flush()
    job.saver.save(snapshot(job), is_best=is_best, before=job.tracker.sync)
    job.account.enter(BOUNDARY)


def stop_if_weights_bad(job: Job) -> None:
    """Raise TrainingError rather than save weights that are not finite. They are equal on all ranks."""
    # One pass without temporaries. A sum that is finite has no term that is not; one that is not may only be too large.
    sums = torch.stack([parameter.detach().sum().isfinite() for parameter in job.model.parameters()])
    bad = None if bool(sums.all()) else first_bad_parameter(job)
    if bad is None:
        return
    raise TrainingError(
        f"the weights are not finite at step {job.state.step} (lr {job.lr():g}), first {bad}; "
        "they are not saved, the last checkpoint stands; use a lower optim.lr or optim.max_grad_norm"
    )


def first_bad_parameter(job: Job) -> str | None:
    return next((name for name, tensor in job.model.named_parameters() if not bool(tensor.isfinite().all())), None)


def snapshot(job: Job) -> Snapshot:
    """All of `job` that a bit-identical continuation needs; its facts (versions, classes, ...) are kept beside it."""
    parameters = dict(job.model.named_parameters())
    shared = {"model": {name: p.detach() for name, p in parameters.items()}, "optimizer": _optimizer_tensors(job)}
    own = {f"buffer/{name}": tensor for name, tensor in persistent_buffers(job.model).items()}
    own[WINDOW] = job.window.own()
    if job.ema is not None:
        shared["ema"] = {name: t for name, t in job.ema.tensors.items() if name in parameters}
        own |= {f"ema/{name}": t for name, t in job.ema.tensors.items() if name not in parameters}
    scaler = job.context.scaler
    state = job.facts | {
        "train_state": job.state.as_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "wall_s": job.wall_s(),
        "time": that_counts(job.time_before, job.account.by_kind()),
        "grad_norm": None if job.grad_norm is None else float(job.grad_norm),
        "metrics_bytes": job.tracker.size(),
    }
    return Snapshot(job.state.step, shared, own, state)


def _optimizer_tensors(job: Job) -> dict[str, Tensor]:
    """Optimizer state as `parameter/entry` to tensor."""
    return {
        f"{name}/{entry}": value
        for name, parameter in job.model.named_parameters()
        if parameter in job.optimizer.state
        for entry, value in job.optimizer.state[parameter].items()
    }


def needed_space(job: Job) -> tuple[int, int]:
    """Bytes of a checkpoint of all ranks, and of its largest file."""
    now = snapshot(job)
    files = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in (*now.shared.values(), now.own)]
    return sum(files) + (job.context.world_size - 1) * files[-1], max(files)


def averaged_state(job: Job, evaluated: nn.Module) -> dict[str, Tensor]:
    """The weights for other programs: plain names, statistics averaged, as the evaluator just used them."""
    live = job.model.state_dict()
    state = {
        name: tensor if tensor.is_floating_point() else live[name] for name, tensor in evaluated.state_dict().items()
    }
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
