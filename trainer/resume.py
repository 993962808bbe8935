"""From a job to a checkpoint and back: which tensor belongs where, and whether a checkpoint fits the run."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from configs.errors import CheckpointError, ConfigError, EnvironmentProblem, LockstepError
from configs.run_dir import step_name
from trainer import checkpoint
from trainer.checkpoint import Loaded, Snapshot
from trainer.job import Job
from trainer.optim import persistent_buffers
from trainer.state import TrainState
from trainer.strangers import check_state

_WINDOW = "window"
MACHINE = ("world_size", "device", "precision", "threads_per_rank")
"""Facts that a resume may change, at the price of the bits."""


def snapshot(job: Job, facts: dict[str, Any]) -> Snapshot:
    """All of `job` that a bit-identical continuation needs; `facts` (versions, classes, ...) are kept beside it."""
    parameters = dict(job.model.named_parameters())
    shared = {"model": {name: p.detach() for name, p in parameters.items()}, "optimizer": _optimizer_tensors(job)}
    own = {f"buffer/{name}": tensor for name, tensor in persistent_buffers(job.model).items()}
    own[_WINDOW] = job.window.own()
    if job.ema is not None:
        shared["ema"] = {name: t for name, t in job.ema.tensors.items() if name in parameters}
        own |= {f"ema/{name}": t for name, t in job.ema.tensors.items() if name not in parameters}
    scaler = job.context.scaler
    state = facts | {
        "train_state": job.state.as_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "wall_s": job.wall_s(),
        "grad_norm": None if job.grad_norm is None else float(job.grad_norm),
    }
    return Snapshot(job.state.step, shared, own, state)


def restore(job: Job, loaded: Loaded, path: Path, facts: dict[str, Any]) -> None:
    """Put a checkpoint into `job`. Raises CheckpointError with the difference if it does not fit."""
    _check_facts(loaded.state, facts, path)
    own = checkpoint.merged_own(loaded, job.context.rank, job.context.world_size, summed=(_WINDOW,))
    parameters = dict(job.model.named_parameters())
    buffers = persistent_buffers(job.model)
    found = loaded.shared["model"] | {
        name.removeprefix("buffer/"): t for name, t in own.items() if name.startswith("buffer/")
    }
    checkpoint.check_fits(_shapes(parameters | buffers), _shapes(found), path)
    with torch.no_grad():
        for name, tensor in (parameters | buffers).items():
            tensor.copy_(found[name])
        job.window.set(own[_WINDOW])
        if job.ema is not None:
            averages = loaded.shared.get("ema", {}) | {
                n.removeprefix("ema/"): t for n, t in own.items() if n.startswith("ema/")
            }
            for name, tensor in job.ema.tensors.items():
                tensor.copy_(averages.get(name, found[name]))  # EMA switched on since: it starts from the weights
    _load_optimizer(job, loaded.shared["optimizer"])
    if job.context.scaler is not None and loaded.state["scaler"] is not None:
        job.context.scaler.load_state_dict(loaded.state["scaler"])
    job.state = TrainState(**loaded.state["train_state"])
    job.wall_s_before = loaded.state["wall_s"]
    if loaded.state["grad_norm"] is not None:
        job.grad_norm = torch.tensor(loaded.state["grad_norm"], dtype=torch.float64)


def _check_facts(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    for name, why in (
        ("classes", "the class list"),
        ("num_classes", "the number of classes"),
        ("num_train", "the number of training samples, and with it their order,"),
        ("global_batch_size", "global_batch_size, and with it the steps of an epoch,"),
        ("drop_last", "drop_last, and with it the steps of an epoch,"),
        ("dtype", "dtype"),
        ("optimizer", "the optimizer"),
    ):
        if saved[name] != now[name]:
            raise CheckpointError(
                f"{path} cannot be resumed: {why} changed: {saved[name]} -> {now[name]}; "
                "start a new run or use init_from"
            )


def _shapes(tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _optimizer_tensors(job: Job) -> dict[str, Tensor]:
    """Optimizer state as `parameter/entry` to tensor."""
    return {
        f"{name}/{entry}": value
        for name, parameter in job.model.named_parameters()
        for entry, value in job.optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _load_optimizer(job: Job, tensors: dict[str, Tensor]) -> None:
    parameters = dict(job.model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    entries: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        entries.setdefault(name, {})[entry] = _laid_out_like(parameters[name], tensor)
    ordered = [names[id(p)] for group in job.optimizer.param_groups for p in group["params"]]
    state = {index: entries[name] for index, name in enumerate(ordered) if name in entries}
    # Through load_state_dict, which knows where each optimizer wants its step counter.
    job.optimizer.load_state_dict(job.optimizer.state_dict() | {"state": state})


def _laid_out_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` in the memory format of its parameter: fused kernels go through both by raw offset."""
    return tensor if tensor.ndim == 0 else torch.empty_like(parameter, device="cpu", dtype=tensor.dtype).copy_(tensor)


def resume_newest(job: Job, folder: Path, facts: dict[str, Any]) -> str | None:
    """Restore the newest valid checkpoint in `folder`, the same on all ranks. Returns its name, or None."""
    context = job.context

    def choose() -> str | None:
        if not context.is_rank_zero:
            return None
        if (folder.is_symlink() or folder.exists()) and not folder.is_dir():
            raise EnvironmentProblem(f"{folder} is no folder; if it is a link, its disk may not be mounted")
        checkpoint.recover(folder)
        damaged: dict[Path, str] = {}
        newest = checkpoint.newest_valid(folder, damaged.__setitem__)
        for path, fault in damaged.items():
            job.console.line(f"skipped {path}: {fault}")
        if newest is None and damaged:
            path, fault = next(iter(damaged.items()))
            raise CheckpointError(f"no valid checkpoint is left in {folder}: {path.name}: {fault}; use --fresh")
        for path in damaged:
            checkpoint.set_aside(path)
        return None if newest is None else newest.name

    name = context.gather_objects(context.together(choose))[0]
    if name is None:
        return None
    loaded = context.together(lambda: _restore_from(job, folder / name, facts))
    changed = [f"{key} {loaded.state[key]} -> {facts[key]}" for key in MACHINE if loaded.state[key] != facts[key]]
    if changed:
        job.console.line(f"goes on elsewhere ({', '.join(changed)}): the same samples, not the same bits")
    return name


def _restore_from(job: Job, path: Path, facts: dict[str, Any]) -> Loaded:
    try:
        loaded = checkpoint.load(path)
        check_state(loaded.state, path)
        restore(job, loaded, path, facts)
    except (LockstepError, MemoryError):
        raise
    except Exception as error:  # its hashes are right, and still it is not what a run writes
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        text = "".join(str(error).splitlines()[:1])
        raise CheckpointError(f"{path} was not written by this trainer: {type(error).__name__}: {text}") from error
    return loaded


def load_weights(model: nn.Module, source: str) -> None:
    """init_from: copy weights and buffers from a safetensors file, or from a run folder's model.safetensors."""
    path = Path(source) / "model.safetensors" if Path(source).is_dir() else Path(source)
    if not path.is_file():
        raise ConfigError(f"init_from: {path} does not exist")
    try:
        found = load_file(path)
    except Exception as error:
        raise CheckpointError(f"init_from: {path} is not a safetensors file: {error}") from error
    wanted = model.state_dict()
    checkpoint.check_fits(_shapes(wanted), _shapes(found), path)
    model.load_state_dict(found)


def load_for_evaluation(job: Job, folder: Path, which: str, facts: dict[str, Any]) -> str:
    """Restore `which` (best, last or a step number), the same on all ranks. Raises CheckpointError."""
    context = job.context
    choose = partial(_choose_for_evaluation, folder, which)
    name = context.gather_objects(context.together(lambda: choose() if context.is_rank_zero else ""))[0]
    context.together(lambda: _restore_from(job, folder / name, facts))
    return name


def _choose_for_evaluation(folder: Path, which: str) -> str:
    """Name of a valid checkpoint. Before the first evaluation there is no best one: then it is the last."""
    best = checkpoint.best_name(folder) if which == "best" else None
    if which in ("best", "last") and best is None:
        newest = checkpoint.newest_valid(folder, lambda *_: None)
        best = None if newest is None else newest.name
    name = best if which in ("best", "last") else step_name(int(which))
    there = [path.name for path in checkpoint.step_folders(folder)]
    if name is None or name not in there:
        raise CheckpointError(f"{folder} has no checkpoint {which!r}; it has {', '.join(there) or 'none'}")
    fault = checkpoint.fault_of(folder / name)
    if fault is not None:
        raise CheckpointError(f"{folder / name} cannot be used: {fault}")
    return name


def averaged_state(job: Job, evaluated: nn.Module) -> dict[str, Tensor]:
    """The weights for other programs: plain names, statistics averaged, as the evaluator just used them."""
    live = job.model.state_dict()
    state = {
        name: tensor if tensor.is_floating_point() else live[name] for name, tensor in evaluated.state_dict().items()
    }
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
