"""From a checkpoint back to a job: whether it fits the run, and which tensor belongs where. See snapshot.py."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.derive import counted
from configs.errors import CheckpointError, EnvironmentProblem, LockstepError, first_line
from configs.run_dir import step_name
from trainer import checkpoint
from trainer.checkpoint import Loaded
from trainer.disk import in_one_sentence
from trainer.facts import DECIDES_BITS
from trainer.job import Job
from trainer.memory import told_if_out_of_memory
from trainer.models import random_layers
from trainer.optim import persistent_buffers
from trainer.snapshot import WINDOW
from trainer.state import TrainState
from trainer.strangers import check_state


def restore(job: Job, loaded: Loaded, path: Path) -> None:
    """Put a checkpoint into `job`. Raises CheckpointError with the difference if it does not fit."""
    _check_facts(loaded.state, job.facts, path, FACTS if job.trains else NETWORK_FACTS)
    _check_files(loaded.state.get("files"), job, path)
    _check_teacher(loaded.state.get("teacher"), job, path)
    rank, ranks, alike = job.context.rank, job.context.world_size, job.config.virtual_shards > 0
    own = checkpoint.merged_own(loaded, rank, ranks, summed=(WINDOW,), alike=alike)
    parameters = dict(job.model.named_parameters())
    buffers = persistent_buffers(job.model)
    found = loaded.shared["model"] | {
        name.removeprefix("buffer/"): t for name, t in own.items() if name.startswith("buffer/")
    }
    checkpoint.check_fits(_shapes(parameters | buffers), _shapes(found), path)
    with torch.no_grad():
        for name, tensor in (parameters | buffers).items():
            tensor.copy_(found[name])
        job.window.set(own[WINDOW])
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
    job.time_before = loaded.state["time"]
    job.metrics_bytes = loaded.state["metrics_bytes"]
    job.clock.samples = job.state.samples_seen
    if loaded.state["grad_norm"] is not None:
        job.grad_norm = torch.tensor(loaded.state["grad_norm"], dtype=torch.float64)


NETWORK_FACTS = {
    "classes": "the class list",
    "num_classes": "the number of classes",
    "dtype": "dtype",
}
FACTS = NETWORK_FACTS | {
    "num_train": "the number of training samples, and with it their order,",
    "global_batch_size": "global_batch_size, and with it the steps of an epoch,",
    "drop_last": "drop_last, and with it the steps of an epoch,",
    "optimizer": "the optimizer",
}


def _check_facts(saved: dict[str, Any], now: dict[str, Any], path: Path, facts: dict[str, str]) -> None:
    for name, why in facts.items():
        if saved[name] != now[name]:
            raise CheckpointError(
                f"{path} cannot be resumed: {why} changed: {saved[name]} -> {now[name]}; "
                "start a new run or use init_from"
            )


def _check_files(saved: dict[str, str] | None, job: Job, path: Path) -> None:
    """Raise CheckpointError where a folder of images changed under a run that is to go on with it."""
    now = job.facts["files"]
    changed = sorted({split for split in now or {} if now[split] != (saved or {}).get(split)})
    if changed and not job.files_may_differ:
        raise CheckpointError(
            f"{path} cannot be resumed: names or sizes of the files in {_place(job)} changed since it was "
            f"saved ({' and '.join(changed)} split); put them back, use --allow-changes to go on with these, or start "
            "a new run"
        )


def _check_teacher(saved: str | None, job: Job, path: Path) -> None:
    """Raise CheckpointError where the teacher was trained on under a run that is to go on with it."""
    now = job.facts["teacher"]
    if saved is not None and now is not None and saved != now and not job.files_may_differ:
        raise CheckpointError(
            f"{path} cannot be resumed: the weights of loss.teacher ({job.config.loss.teacher}) changed since it was "
            "saved; put them back, use --allow-changes to go on with these, or start a new run"
        )


def _place(job: Job) -> str:
    return job.config.data.huggingface.path or job.config.data.root


def _shapes(tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _load_optimizer(job: Job, tensors: dict[str, Tensor]) -> None:
    """What the checkpoint lacks, such as a momentum that is new, is zero."""
    for state in job.optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    parameters = dict(job.model.named_parameters())
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        if entry in (state := job.optimizer.state.get(parameters[name], {})):  # none of what is frozen now
            state[entry].copy_(tensor)


def resume_newest(job: Job, folder: Path) -> str | None:
    """Restore the newest valid checkpoint in `folder`, the same on all ranks. Returns its name, or None."""
    context = job.context

    def choose() -> str | None:
        if not context.is_rank_zero:
            return None
        if (folder.is_symlink() or folder.exists()) and not folder.is_dir():
            raise EnvironmentProblem(f"{folder} is no folder; if it is a link, its disk may not be mounted")
        damaged: dict[Path, str] = {}
        with in_one_sentence("clear", folder):
            checkpoint.recover(folder, damaged.__setitem__)
        newest = checkpoint.newest_valid(folder, damaged.__setitem__)
        for path, fault in damaged.items():
            job.console.line(f"skipped {path}: {fault}")
        if newest is None and damaged:
            path, fault = next(iter(damaged.items()))
            raise CheckpointError(f"no valid checkpoint is left in {folder}: {path.name}: {fault}; use --fresh")
        for path in damaged:
            if path.exists() or path.is_symlink():
                job.console.line(f"kept what was skipped as {checkpoint.set_aside(path).name}")
        return None if newest is None else newest.name

    name = context.gather_objects(context.together(choose))[0]
    if name is None:
        return None
    loaded = context.together(lambda: _restore_from(job, folder / name))
    context.together(lambda: _mark_best_again(job, folder) if context.is_rank_zero else None)
    for line in _differences(job, loaded.state, job.facts):
        job.console.line(line)
    return name


def _mark_best_again(job: Job, folder: Path) -> None:
    """A kill between a checkpoint and best.json: the checkpoint itself knows that it is the best."""
    best = step_name(job.state.best_step)
    if checkpoint.best_name(folder) != best and checkpoint.fault_of(folder / best) is None:
        with in_one_sentence("write", folder / checkpoint.BEST):
            checkpoint.mark_best(folder, best)


def _differences(job: Job, saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is not as it was when the checkpoint was made, and so keeps this run from going on bit by bit."""
    before = now | saved  # a checkpoint of an earlier version lacks some
    keys = [*DECIDES_BITS, "virtual_shards", "micro_batch"]
    if not (before["virtual_shards"] and now["virtual_shards"]):
        keys.insert(0, "world_size")
    changed = [f"{key} {before[key]} -> {now[key]}" for key in keys if before[key] != now[key]]
    torches = saved["versions"]["torch"], now["versions"]["torch"]
    if torches[0] != torches[1]:
        changed.append(f"torch {torches[0]} -> {torches[1]}")
    lines = []
    if before["decoder"] != now["decoder"]:
        lines = [f"images were decoded by {before['decoder']}, now by {now['decoder']}: pixels may differ"]
    if not changed:
        return lines
    lines += [f"goes on elsewhere ({', '.join(changed)}): the same samples, not the same bits"]
    draws_alike = all(text.startswith("threads_per_rank ") for text in changed)
    if not draws_alike and (layers := random_layers(job.model)):
        # What they draw is keyed by batch and rank and so not lost, but the ranks' shares are others now.
        lines.append(f"  other random numbers from here on in {_some(layers)}")
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in persistent_buffers(job.model)))
    if layers and "world_size" in keys and saved["world_size"] != now["world_size"]:
        lines.append(f"  the mean of what {counted(saved['world_size'], 'rank')} had gathered in {_some(layers)}")
    return lines


def _some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _restore_from(job: Job, path: Path) -> Loaded:
    try:
        with told_if_out_of_memory(f"while {path} was read", "it takes host memory for all that was saved"):
            loaded = checkpoint.load(path)
            check_state(loaded.state, path)
            restore(job, loaded, path)
    except (LockstepError, MemoryError):
        raise
    except Exception as error:  # its hashes are right, and still it is not what a run writes
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        what = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{path} was not written by this trainer: {what}") from error
    return loaded


def load_for_evaluation(job: Job, folder: Path, which: str) -> str:
    """Restore `which` (best, last or a step number), the same on all ranks. Raises CheckpointError."""
    context = job.context
    choose = partial(_choose_for_evaluation, folder, which, job.console.line)
    name = context.gather_objects(context.together(lambda: choose() if context.is_rank_zero else ""))[0]
    context.together(lambda: _restore_from(job, folder / name))
    return name


def _choose_for_evaluation(folder: Path, which: str, say: Callable[[str], None]) -> str:
    """Name of a valid checkpoint. Where there is no best one, or it is damaged, that is said and it is the last."""
    there = [path.name for path in checkpoint.step_folders(folder)]
    if which not in ("best", "last"):
        name = step_name(int(which))
        if name not in there:
            raise CheckpointError(f"{folder} has no checkpoint {which!r}; it has {', '.join(there) or 'none'}")
        if fault := checkpoint.fault_of(folder / name):
            raise CheckpointError(f"{folder / name} cannot be evaluated: {fault}; choose another, or `last`")
        return name
    best = checkpoint.best_name(folder) if which == "best" else None
    if best is not None:
        fault = (
            checkpoint.fault_of(folder / best) if best in there else f"{checkpoint.BEST} names it, but it is missing"
        )
        if fault is None:
            return best
        say(f"skipped {folder / best}, the best: {fault}")
    newest = checkpoint.newest_valid(folder, lambda path, fault: say(f"skipped {path}: {fault}"))
    if newest is None:
        raise CheckpointError(f"{folder} has no valid checkpoint ({', '.join(there) or 'it is empty'}); train first")
    return newest.name
