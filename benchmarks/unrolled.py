"""Steady state of the tutorial's job with 25 updates in one compiled call, against eager loops; one thread."""

import contextlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness import Row, Target, in_turn, ratio_row
from benchmarks.jobs import STEADY, build_job, tutorial_config
from benchmarks.tutorial import (
    BY_HAND,
    LIMIT,
    LOCKSTEP,
    STEPS,
    UNIT,
    Rate,
    bare_model,
    bare_steps,
    block,
    normalise,
    steps_by_hand,
    timed,
)
from trainer.boundary import at_boundary
from trainer.job import Job
from trainer.loop import take_step
from trainer.multistep import MultiStep

ROUNDS = 100
COUNT = 25  # divides the 50 steps between log points
SETTINGS = (*STEADY, f"steps_per_execution={COUNT}")


def measure(rounds: int | None = None) -> list[Row]:
    """Blocks in turn, compiled beforehand."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        job = build_job(tutorial_config(*SETTINGS), Path(folder))
        images, labels = job.source.images, job.source.labels
        variants: dict[str, Callable[[], Rate]] = {
            LOCKSTEP: groups(job),
            BY_HAND: block(steps_by_hand(bare_model(job), images, labels)),
            LIMIT: block(bare_steps(bare_model(job), images, labels, normalise)),
        }
        in_turn(variants, 1)
        measured = in_turn(variants, rounds or ROUNDS)
        job.tracker.close()
    rates = {name: [rate.wall for rate in found] for name, found in measured.items()}
    return [
        ratio_row("unrolled/by-hand", rates, LOCKSTEP, BY_HAND, UNIT, Target(">=", 2)),
        ratio_row("unrolled/limit", rates, LOCKSTEP, LIMIT, UNIT),
    ]


def groups(job: Job) -> Callable[[], Rate]:
    """Blocks of such steps."""
    take = steps_in_groups(job)

    def measured() -> Rate:
        take(-job.state.step % STEPS)  # the warm-up of the block before has shifted it
        return timed(take)

    return measured


def steps_in_groups(job: Job) -> Callable[[int], None]:
    """What trainer.loop.train does with this job, for a number of steps."""
    order = job.order.batches(0, 0)
    batches, multistep = job.source.training(order), MultiStep(job)

    def take(steps: int) -> None:
        end = job.state.step + steps
        while job.state.step < end:
            if not multistep.take(job, order):
                take_step(job, batches)
            if job.pending is None:
                at_boundary(job)

    return take
