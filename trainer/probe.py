"""What only a real step can tell: parameters, checkpoint size, time and memory. Used by `plan --probe`."""

import contextlib
import dataclasses
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from configs.contract import WorkerPlan
from configs.image_sizes import at_largest_size, training_sizes
from configs.run_dir import AttemptDir, RunDir
from trainer.build import build
from trainer.job import Job
from trainer.probe_input import measure_input
from trainer.probe_shards import measure_shards
from trainer.run import Run
from trainer.runtime import RunContext
from trainer.snapshot import snapshot
from trainer.speed import count_speed, describe_speed
from trainer.stop import StopFlag
from trainer.timing import timed_step
from trainer.waiting import cores


def measure(plan: WorkerPlan) -> dict[str, Any]:
    """Build the job for one process and take three steps of one rank's share;
    the fastest is reported, in milliseconds, and what it achieves. With virtual shards also what they
    cost, and of streamed data how fast they are read."""
    with build_alone(plan) as job:
        batches = job.source.training(job.order.batches(0, 0))
        times = [timed_step(job, *next(batches)) for _ in range(3)]
        saved = snapshot(job)
        tensors = [tensor for part in (*saved.shared.values(), saved.own) for tensor in part.values()]
        speed = count_speed(job)
        measured = {
            "parameters": sum(parameter.numel() for parameter in job.model.parameters()),
            "checkpoint_bytes": sum(tensor.nbytes for tensor in tensors),
            "step_ms": 1000 * min(times),
            "peak_memory_bytes": _peak_bytes(job.context.device),
            "num_train": job.facts["num_train"],
            "num_eval": job.facts["num_eval"],
            "flops": describe_speed(speed.facts(job.order.global_batch_size / min(times))),
            "notes": speed.notes(),
            "step_samples": job.order.global_batch_size,
            "input": measure_input(job, plan.num_workers, cores()),
        }
        return measured | (measure_shards(job, plan) if plan.config.virtual_shards else {})


@contextlib.contextmanager
def build_alone(plan: WorkerPlan, **changes: Any) -> Iterator[Job]:
    """The job of one process whose global batch is one rank's share, with `changes` to its config; of images as large
    as any will be."""
    sizes: dict[str, Any] = {
        "global_batch_size": plan.batches.max_slice,
        "per_device_batch_size": None,
        "faults": (),
        "virtual_shards": 0,
        "steps_per_execution": 1,
    }
    if training_sizes(plan.config.data):
        sizes["data"] = at_largest_size(plan.config.data)
    config = plan.config.model_copy(update=sizes | changes)
    alone = dataclasses.replace(plan, config=config, world_size=1, local_world_size=1, store=None, terminal=None)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Run(alone, RunDir(Path(folder)), AttemptDir(Path(folder)), StopFlag())
        job, _ = build(run, RunContext(alone))
        yield job


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
