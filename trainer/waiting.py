"""Whether training waits for its data, and what would help: told once on the way, and at the end."""

import os
from dataclasses import dataclass

import torch

from configs.derive import counted
from configs.known_data import ENCODED
from trainer.data import jpeg
from trainer.data.stream import StreamSource
from trainer.job import Job

BOUND = 0.25
"""Share of the steps' time from which on it is told."""
NOT_BEFORE_S = 10.0
"""In steps: the first ones wait for the workers to start."""


@dataclass(frozen=True)
class Reading:
    """How this machine reads the data."""

    workers: int
    """Of all its ranks; 0: the ranks read by themselves."""
    ranks: int
    free_cores: int
    on_gpu: bool
    lacks_simplejpeg: bool

    def describe_wait(self, share: float, images_per_s: float) -> str:
        """One sentence; `share` is that of the steps' time which went into waiting for data."""
        who = counted(self.workers, "loader worker") if self.workers else "the ranks themselves"
        waited = f"{100 * share:.0f} % of the steps' time went into waiting for data"
        text = f"{waited}: {who} read {images_per_s:,.0f} images/s"
        # A GPU computes while its host waits: there the rest of the time is not the time of a step.
        if not self.on_gpu and share < 1:
            text += f", and the steps could take {images_per_s / (1 - share):,.0f}"
        return f"{text}; {self._help()}"

    def _help(self) -> str:
        more = self.free_cores // self.ranks
        simplejpeg = ["simplejpeg (pip install simplejpeg)"] if self.lacks_simplejpeg else []
        if more > 0:
            wanted = self.workers // self.ranks + more
            free = f"{counted(self.free_cores, 'core')} {'is' if self.free_cores == 1 else 'are'} free"
            return " and ".join([*simplejpeg, f"data.num_workers={wanted}"]) + f" would help: {free}"
        return " and ".join([*simplejpeg, "smaller image files"]) + " would help; no core is free for more workers"


def tell_of_wait(job: Job, share: float, images_per_s: float) -> bool:
    """Of the time since the last log point, or of all steps; `images_per_s` are those of all ranks. Returns whether
    there was anything to tell."""
    context, source = job.context, job.source
    if share < BOUND or not isinstance(source, StreamSource):
        return False
    ranks, workers = context.local_world_size, source.num_workers
    on_gpu = context.device.type != "cpu"
    busy = workers + (1 if on_gpu or not workers else torch.get_num_threads())
    reading = Reading(
        workers=workers * ranks,
        ranks=ranks,
        free_cores=max(0, cores() - ranks * busy),
        on_gpu=on_gpu,
        lacks_simplejpeg=job.config.data.name in ENCODED and jpeg.library() is None,
    )
    of_this_machine = images_per_s * ranks / context.world_size
    job.console.line(f"note: {reading.describe_wait(share, of_this_machine)}")
    return True


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
