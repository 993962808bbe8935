"""The largest micro-batch that fits in memory: tried on a GPU, estimated elsewhere. Used by `plan --probe-batch`."""

import gc
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from configs.contract import WorkerPlan
from trainer.data.order import RankBatch
from trainer.data.source import free_bytes
from trainer.job import Job
from trainer.loop import train_step
from trainer.memory import is_out_of_memory
from trainer.outcome import settle
from trainer.probe import build_alone

# What is left for the communication of several ranks, for fragments and for other programs.
_SHARE = 0.9
# Devices whose error can be caught; a process that takes too much of the host's memory is killed. Tests add the CPU.
TRIED = ["cuda"]


@dataclass
class _Trial:
    """One rank's share of a global batch, of which the first samples are trained on."""

    job: Job
    images: Tensor
    labels: Tensor
    ids: Tensor
    accumulates: bool
    """Whether gradients are there during the forward pass even where the whole share is one micro-batch."""

    def step(self, size: int) -> None:
        """One real update with micro-batches of `size`; twice where the run would accumulate, as gradients stay."""
        times = 2 if self.accumulates or size < len(self.ids) else 1
        pieces = [self.ids[:size]] * times
        batch = RankBatch(0, 0, times * size, pieces, False, pieces, [(0, i) for i in range(times)])
        train_step(self.job, batch, [(self.images[:size], self.labels[:size])] * times)
        settle(self.job)

    def fits(self, size: int) -> bool:
        try:
            self.step(size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            self._forget()
        return True

    def _forget(self) -> None:
        self.job.pending = None
        for parameter in self.job.parameters:
            parameter.grad = None
        gc.collect()
        torch.cuda.empty_cache()


def largest_micro_batch(plan: WorkerPlan) -> dict[str, int | bool]:
    """The largest micro-batch of one rank, at most its share of the global batch; 0 if not even one sample fits."""
    share = plan.batches.max_slice
    # A learning rate of zero: many updates on the same samples could end in numbers that are not finite.
    still = {"optim": plan.config.optim.model_copy(update={"lr": 0.0}), "max_per_device_batch_size": None}
    with build_alone(plan, **still) as job:
        batch, pieces = next(job.source.training(job.order.batches(0, 0)))
        (images, labels), ids = pieces[0], batch.pieces[0]
        trial = _Trial(job, images, labels, ids, accumulates=plan.world_size > 1)
        is_tried = job.context.device.type in TRIED
        if job.context.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(_SHARE)
        found = largest_fitting(trial.fits, len(ids)) if is_tried else _estimate(trial, plan.local_world_size)
        return {
            "largest_micro_batch": share if found == len(ids) else found,
            "share": share,
            "is_estimate": not is_tried,
        }


def largest_fitting(fits: Callable[[int], bool], limit: int) -> int:
    """The largest size up to `limit` that fits, 0 if none does: doubled until one does not, then by bisection."""
    good, size = 0, min(2, limit)  # BatchNorm cannot train on one sample: that is tried last
    while fits(size):
        if size == limit:
            return limit
        good, size = size, min(2 * size, limit)
    bad = size
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _estimate(trial: _Trial, local_world_size: int) -> int:
    """By the memory that two small sizes take; a size that is too large would end this process, and others."""
    limit = len(trial.ids)
    small, large = max(1, limit // 8), max(2, limit // 4)
    if limit < large:
        return limit
    trial.step(large)  # makes the optimizer's state, and what libraries keep
    peaks = []
    for size in (small, large):
        _reset_peak()
        trial.step(size)
        peaks.append(_peak_bytes())
    budget = _SHARE * (free_bytes(trial.job.context.device, 1) + _resident_bytes()) / local_world_size
    return estimate_fitting((small, large), (peaks[0], peaks[1]), budget, limit)


def estimate_fitting(sizes: tuple[int, int], peaks: tuple[int, int], budget: float, limit: int) -> int:
    """The size at which the line through two peaks of memory (bytes) meets `budget`, at most `limit`."""
    growth = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    if growth <= 0:  # too little to be seen
        return limit
    base = peaks[0] - growth * sizes[0]
    return max(0, min(limit, int((budget - base) / growth)))


def _reset_peak() -> None:
    """Have the kernel forget the peak so far, which loading the data may have made. Only Linux can."""
    refs = Path("/proc/self/clear_refs")
    if refs.exists():
        refs.write_text("5", encoding="ascii")


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    high = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return 1024 * high[0] if high else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
