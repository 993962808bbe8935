"""The time of one step, for the probes."""

import time

import torch

from trainer.data.order import RankBatch
from trainer.faults import Pieces
from trainer.job import Job
from trainer.loop import train_step
from trainer.outcome import settle


def timed_step(job: Job, batch: RankBatch, pieces: Pieces) -> float:
    """Seconds of one step, without the wait for its batch."""
    start = time.perf_counter()
    train_step(job, batch, pieces)
    settle(job)
    if job.context.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
