"""Checkpoints without a run around them."""

from pathlib import Path

import torch

from configs.sections import LaunchConfig
from trainer.checkpoint import Snapshot
from trainer.runtime import RunContext
from trainer.saving import Saver


def rank_of(rank: int, world_size: int) -> RunContext:
    """A rank without a process group and without Accelerate: it can take no part in a collective."""
    context = object.__new__(RunContext)
    context.rank, context.world_size = rank, world_size
    return context


def alone() -> RunContext:
    """The only rank there is."""
    return rank_of(0, 1)


def nothing() -> None: ...


def saver_of(context: RunContext, folder: Path, keep: int = 9, said: list[str] | None = None) -> Saver:
    return Saver(context, folder, keep, LaunchConfig(collective_timeout_s=60.0), ([] if said is None else said).append)


def save(context: RunContext, folder: Path, snapshot: Snapshot, keep: int = 9, *, is_best: bool = False) -> Path:
    """Save and wait until it is published. Raises what went wrong, after clearing up."""
    saver = saver_of(context, folder, keep)
    saver.save(snapshot, is_best=is_best, before=nothing)
    try:
        saver.settle()
    finally:
        saver.abandon()
    return folder / f"step_{snapshot.step:08d}"


def snapshot(step: int, value: float = 0.5, world_size: int = 1, rank: int = 0) -> Snapshot:
    """What a rank might save; `value` tells two of the same step apart."""
    weights = {"w": torch.full((3, 2), value), "half": torch.tensor([1.5], dtype=torch.float16)}
    own = {"buffer/mean": torch.tensor([value + rank], dtype=torch.float64), "buffer/count": torch.tensor(step)}
    state = {"world_size": world_size, "note": "é", "step": step}
    return Snapshot(step, {"model": weights, "optimizer": {}}, own, state)
