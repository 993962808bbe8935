"""A real job in this process, built as the worker builds it, to be driven step by step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import ROOT
from configs.contract import WorkerPlan
from configs.loader import load_config
from configs.run_dir import AttemptDir, RunDir
from configs.schema import RunConfig
from trainer.boundary import at_boundary
from trainer.build import build
from trainer.job import Job
from trainer.loop import take_step
from trainer.prepare import prepare_data
from trainer.run import Run
from trainer.runtime import RunContext
from trainer.stop import StopFlag
from trainer.tracking import Tracker

# Steady state: no evaluation, no checkpoint, and an end that is never reached. Logging stays as it is.
STEADY = ("max_epochs=1000000", "eval.every_epochs=null", "checkpoint.every_epochs=null", "log.console_every_s=1e9")


def tutorial_config(*overrides: str) -> RunConfig:
    """configs/tutorial.yaml, changed."""
    return load_config(ROOT / "configs/tutorial.yaml", [f"data.root={ROOT / 'data'}", *overrides]).config


def build_job(config: RunConfig, folder: Path, context: RunContext | None = None, **plan: Any) -> Job:
    """The worker's job, with its tracker writing to `folder`; by default for one process with one thread on the CPU.
    A second one in the same process takes the `context` of the first."""
    fields = {"launcher": "direct", "device": "cpu", "world_size": 1, "local_world_size": 1, "threads_per_rank": 1}
    worker = WorkerPlan(mode="train", config=config, **(fields | plan))
    prepare_data(config.data)
    run = Run(worker, RunDir(folder), AttemptDir(folder), StopFlag())
    job, _ = build(run, context or RunContext(worker))
    if job.context.is_rank_zero:
        folder.mkdir(exist_ok=True)
        job.tracker = Tracker(run.run_dir, 0)
    job.module.train()
    return job


def batches_of(job: Job) -> Iterator[tuple[Any, list[tuple[Tensor, Tensor]]]]:
    """The job's batches from the beginning, without end."""
    return job.source.training(job.order.batches(0, 0))


def take_steps(job: Job, batches: Iterator[Any], steps: int) -> None:
    """What trainer.loop.train does, for `steps` global batches."""
    for _ in range(steps):
        take_step(job, batches)
        if job.pending is None:
            at_boundary(job)


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
