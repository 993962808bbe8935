"""What Lockstep's own parts cost of a step: the tutorial's job at batch 64 on one thread, each left out in turn."""

import contextlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import jobs
from benchmarks.harness import Row, in_turn, ratio_row
from benchmarks.jobs import STEADY, batches_of, build_job, take_steps, tutorial_config
from benchmarks.tutorial import BATCH, LIMIT, LOCKSTEP, bare_model, bare_steps, block, normalise, timed
from trainer import boundary, loop
from trainer.job import Job

ROUNDS = 60


def measure(rounds: int | None = None) -> list[Row]:
    """The job without a part against the whole job: what is missing from 1 is that part's share of the step."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        job = build_job(tutorial_config(*STEADY), Path(folder))
        variants = _variants(job)
        in_turn(variants, 1)
        measured = in_turn(variants, rounds or ROUNDS)
        job.tracker.close()
    return [ratio_row(f"parts/{name}", measured, name, LOCKSTEP, "us a step") for name in variants if name != LOCKSTEP]


def _variants(job: Job) -> dict[str, Callable[[], float]]:
    batches = batches_of(job)

    def whole() -> float:
        return _us(lambda: timed(lambda steps: take_steps(job, batches, steps)).wall)

    def without(owner: Any, name: str, answer: Any = None) -> Callable[[], float]:
        def measured() -> float:
            with patch.object(owner, name, lambda *_: answer):
                return whole()

        return measured

    bare = block(bare_steps(bare_model(job), job.source.images, job.source.labels, normalise))
    return {
        LOCKSTEP: whole,
        "again": whole,
        "no look for what is not finite": without(loop, "has_finite_gradients", answer=True),
        "no log points": without(boundary, "log_point"),
        "no account": without(job.account, "enter"),
        "no boundaries": without(jobs, "at_boundary", answer=True),
        LIMIT: lambda: _us(lambda: bare().wall),
    }


def _us(rate: Callable[[], float]) -> float:
    """Of samples/s, microseconds a step."""
    return 1e6 * BATCH / rate()
