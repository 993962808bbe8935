"""What equal bits cost: virtual shards against DDP, and against the ordinary step of one process, on a residual net."""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ddp import GLOBAL_BATCH, STEPS, WORLD, block, rates_of_ranks, resnet_config, result_of
from benchmarks.harness import Row, Target, in_turn, ratio_row

ROUNDS = 15
ONE_PROCESS_SHARDS = 4
ORDINARY, SHARDED = "ordinary steps", "virtual shards"


def measure(rounds: int | None = None) -> list[Row]:
    """Ratios of times a step, so of rates the other way round."""
    two = rates_of_ranks("benchmarks.shards", rounds or ROUNDS)
    one = _one_process(rounds or ROUNDS)
    return [
        ratio_row(f"shards/{WORLD} processes", two, ORDINARY, SHARDED, "samples/s", Target("<=", 1.15)),
        ratio_row("shards/1 process", one, ORDINARY, SHARDED, "samples/s", Target("<=", 1.25)),
    ]


def _one_process(rounds: int) -> dict[str, list[float]]:
    """Samples/s with micro-batches of the same size: accumulated, or each a shard."""
    from benchmarks.jobs import batches_of, build_job, take_steps
    from trainer.deterministic import ask_for_deterministic_kernels

    def timed(job: Any, batches: Any) -> float:
        ask_for_deterministic_kernels(wanted=job.shards is not None)
        start = time.perf_counter()
        take_steps(job, batches, STEPS)
        return STEPS * GLOBAL_BATCH / (time.perf_counter() - start)

    ordinary = {"max_per_device_batch_size": GLOBAL_BATCH // ONE_PROCESS_SHARDS}
    sharded = {"virtual_shards": ONE_PROCESS_SHARDS}
    variants: dict[str, Callable[[], float]] = {}
    with tempfile.TemporaryDirectory() as name:
        context = None
        for variant, change in ((ORDINARY, ordinary), (SHARDED, sharded)):
            job = build_job(resnet_config().model_copy(update=change), Path(name) / variant[:8], context)
            context, batches = job.context, batches_of(job)
            variants[variant] = lambda job=job, batches=batches: timed(job, batches)
            variants[variant]()
        return in_turn(variants, rounds)


def measure_rank(folder: Path, rank: int, rounds: int) -> None:
    """One of two ranks: write the seconds of its blocks."""
    from benchmarks.jobs import batches_of, build_job
    from trainer.deterministic import ask_for_deterministic_kernels
    from trainer.loop import settle_buckets

    plan: dict[str, Any] = {"world_size": WORLD, "local_world_size": WORLD, "store": str(folder / "store")}
    ordinary = build_job(resnet_config(), folder / "ddp", **plan)
    settle_buckets(ordinary)
    config = resnet_config().model_copy(update={"virtual_shards": WORLD})
    sharded = build_job(config, folder / "shards", ordinary.context, **plan)
    variants: dict[str, Callable[[], float]] = {}
    for variant, job in ((ORDINARY, ordinary), (SHARDED, sharded)):
        job.module.train()
        batches = batches_of(job)

        def timed(job: Any = job, batches: Any = batches) -> Any:
            ask_for_deterministic_kernels(wanted=job.shards is not None)
            return block(job, batches, contextlib.nullcontext())

        variants[variant] = timed
        variants[variant]()
    result_of(folder, rank).write_text(json.dumps(in_turn(variants, rounds)), encoding="utf-8")
    ordinary.context.close()


if __name__ == "__main__":
    from trainer.parent import die_with_parent

    die_with_parent()
    measure_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
