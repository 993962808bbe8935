"""What only a real step can tell: parameters, checkpoint size, time and memory. Used by `plan --probe`."""

import dataclasses
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from configs.contract import WorkerPlan
from configs.run_dir import AttemptDir, RunDir
from trainer.build import build
from trainer.job import Job
from trainer.loop import train_step
from trainer.outcome import settle
from trainer.probe_shards import measure_shards
from trainer.resume import snapshot
from trainer.run import Run
from trainer.runtime import RunContext
from trainer.stop import StopFlag


def measure(plan: WorkerPlan) -> dict[str, int | float]:
    """Build the job for one process and take three steps of one rank's share;
    the fastest is reported, in milliseconds. With virtual shards also what they cost."""
    job = build_alone(plan)
    batches = job.source.training(job.order.batches(0, 0))
    times = []
    for _ in range(3):
        batch, pieces = next(batches)
        start = time.perf_counter()
        train_step(job, batch, pieces)
        settle(job)
        if job.context.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    saved = snapshot(job)
    tensors = [tensor for part in (*saved.shared.values(), saved.own) for tensor in part.values()]
    measured = {
        "parameters": sum(parameter.numel() for parameter in job.model.parameters()),
        "checkpoint_bytes": sum(tensor.nbytes for tensor in tensors),
        "step_ms": 1000 * min(times),
        "peak_memory_bytes": _peak_bytes(job.context.device),
        "num_train": job.facts["num_train"],
        "num_eval": job.facts["num_eval"],
    }
    return measured | (measure_shards(job, plan) if plan.config.virtual_shards else {})


def build_alone(plan: WorkerPlan, **changes: Any) -> Job:
    """The job of one process whose global batch is one rank's share, with `changes` to its config."""
    sizes = {
        "global_batch_size": plan.batches.max_slice,
        "per_device_batch_size": None,
        "faults": (),
        "virtual_shards": 0,
    }
    config = plan.config.model_copy(update=sizes | changes)
    alone = dataclasses.replace(plan, config=config, world_size=1, local_world_size=1, store=None, terminal=None)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(alone, RunDir(Path(folder)), AttemptDir(Path(folder)), StopFlag())
        job, _ = build(run, RunContext(alone))
    return job


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
