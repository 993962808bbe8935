"""What virtual shards cost on this machine: a few steps of one process's share. Used by `plan --probe`."""

import dataclasses
import statistics
from collections.abc import Callable
from functools import partial

from configs.contract import WorkerPlan
from configs.derive import plan_batches
from trainer.data.order import Order, RankBatch
from trainer.deterministic import ask_for_deterministic_kernels, told_if_not_deterministic
from trainer.faults import Pieces
from trainer.job import Job
from trainer.shards import Shards
from trainer.timing import timed_step

_ROUNDS = 7
"""Steps of each kind; they take turns, so that what else the machine does meets all alike."""


def measure_shards(job: Job, plan: WorkerPlan) -> dict[str, float]:
    """Median milliseconds of a step: the share of one rank through its shards, accumulated in the same micro-batches,
    and cut as it would be without virtual shards. `job` is one process's, without shards."""
    shards, micro_batch = plan.config.virtual_shards // plan.world_size, plan.batches.max_micro_batch
    without = plan.config.model_copy(update={"virtual_shards": 0})
    plain = plan_batches(without, plan.world_size, plan.max_micro_batch).max_micro_batch
    ordinary = partial(_step_of, job, False)
    accumulated = dataclasses.replace(job.order, max_micro_batch=micro_batch)
    kinds: dict[str, Callable[[], float]] = {
        "accumulated_ms": ordinary(accumulated),
        "plain_ms": ordinary(dataclasses.replace(job.order, max_micro_batch=plain)),
    }
    in_shards = dataclasses.replace(accumulated, num_shards=shards)
    sharded = dataclasses.replace(job, shards=Shards(job.model, job.context, in_shards, lambda _: None))
    kinds["shards_ms"] = _step_of(sharded, True, in_shards)
    for step in kinds.values():
        step()
    times = [{name: step() for name, step in kinds.items()} for _ in range(_ROUNDS)]
    return {name: 1000 * statistics.median(turn[name] for turn in times) for name in kinds}


def _step_of(job: Job, wants_bits: bool, order: Order) -> Callable[[], float]:
    """A function that takes one step, always on the first batch, and returns its seconds."""
    batch, pieces = next(job.source.training(order.batches(0, 0)))
    return partial(_timed, job, batch, pieces, wants_bits)


def _timed(job: Job, batch: RankBatch, pieces: Pieces, wants_bits: bool) -> float:
    ask_for_deterministic_kernels(wanted=wants_bits, compiles=job.is_compiled)
    device = job.facts["gpu"] or job.context.device.type
    try:
        with told_if_not_deterministic(job.model, device, is_asked=wants_bits):
            return timed_step(job, batch, pieces)
    finally:
        ask_for_deterministic_kernels(wanted=False, compiles=job.is_compiled)
