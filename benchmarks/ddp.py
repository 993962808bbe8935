"""Two processes of one thread on a residual net: steps with communication against the same without."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Row, Target, in_turn, ratio_row

WORLD = 2
GLOBAL_BATCH = 128
STEPS = 4  # of a block; each takes 0.1 s and more
ROUNDS = 30
TOGETHER, ALONE = "with communication", "without"


def measure(rounds: int | None = None) -> list[Row]:
    """Blocks in turn in the same two processes. A block's rate is that of both ranks together."""
    rates = rates_of_ranks("benchmarks.ddp", rounds or ROUNDS)
    return [ratio_row("ddp/resnet", rates, TOGETHER, ALONE, "samples/s", Target(">=", 0.95))]


def rates_of_ranks(module: str, rounds: int) -> dict[str, list[float]]:
    """Samples/s of both ranks together in each block of each variant; `python -m MODULE FOLDER RANK ROUNDS` is a rank,
    which leaves the seconds of its blocks by variant."""
    with tempfile.TemporaryDirectory() as name:
        ranks = [_start(module, Path(name), rank, rounds) for rank in range(WORLD)]
        _finish(ranks, Path(name))
        times = [json.loads(result_of(Path(name), rank).read_text(encoding="utf-8")) for rank in range(WORLD)]
    share = STEPS * GLOBAL_BATCH / WORLD
    return {
        name: [sum(share / seconds for seconds in block) for block in zip(*(time[name] for time in times), strict=True)]
        for name in times[0]
    }


def _start(module: str, folder: Path, rank: int, rounds: int) -> subprocess.Popen[bytes]:
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    environment |= {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
    with _log(folder, rank).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(rank), str(rounds)],
            cwd=ROOT,
            env=os.environ | {key: str(value) for key, value in environment.items()},
            stdout=log,
            stderr=log,
        )


def _finish(ranks: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for both; if one fails, end the other, which would wait for it."""
    try:
        while any(rank.poll() is None for rank in ranks):
            failed = [rank for rank, process in enumerate(ranks) if process.poll()]
            if failed:
                raise RuntimeError(f"rank {failed[0]}: {_log(folder, failed[0]).read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert all(process.returncode == 0 for process in ranks), [process.returncode for process in ranks]


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def result_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def measure_rank(folder: Path, rank: int, rounds: int) -> None:
    """One rank: write the seconds of its blocks."""
    from benchmarks.jobs import batches_of, build_job
    from trainer.loop import settle_buckets

    job = build_job(resnet_config(), folder, world_size=WORLD, local_world_size=WORLD, store=str(folder / "store"))
    settle_buckets(job)
    job.module.train()
    batches = batches_of(job)
    variants: dict[str, Callable[[], float]] = {
        TOGETHER: lambda: block(job, batches, contextlib.nullcontext()),
        # The ranks' weights stay equal all the same: the learning rate is 0.
        ALONE: lambda: block(job, batches, job.module.no_sync()),
    }
    for variant in variants.values():
        variant()
    result_of(folder, rank).write_text(json.dumps(in_turn(variants, rounds)), encoding="utf-8")
    job.context.close()


def block(job: Any, batches: Iterator[Any], mode: contextlib.AbstractContextManager[Any]) -> float:
    """Seconds that this rank takes for one block; the ranks begin together."""
    import torch.distributed as dist

    from benchmarks.jobs import take_steps

    dist.barrier()
    with mode:
        start = time.perf_counter()
        take_steps(job, batches, STEPS)
        return time.perf_counter() - start


def resnet_config() -> Any:
    """small_resnet on random images; no log point inside a block, since it is a collective."""
    from configs.schema import RunConfig

    settings = {
        "global_batch_size": GLOBAL_BATCH,
        "max_epochs": 1_000_000,
        "mixed_precision": "no",
        "device": "cpu",
        "data": {"name": "benchmarks.synthetic:images", "num_classes": 10, "residency": "device"},
        "model": {"name": "small_resnet"},
        "optim": {"name": "sgd", "lr": 0.0, "momentum": 0.9},
        "log": {"every_steps": 1_000_000},
        "eval": {"every_epochs": None},
        "checkpoint": {"every_epochs": None},
    }
    return RunConfig.model_validate(settings)


if __name__ == "__main__":
    from trainer.parent import die_with_parent

    die_with_parent()
    measure_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
