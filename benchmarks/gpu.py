"""Images/s of the real job on one GPU, in fp32, bf16 and fp16; where there is none, the row says why."""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, in_turn, not_measured, ratio_row, run_python
from launch.topology import detect_topology

ROUNDS = 3
BATCH = 512
STEPS, BLOCKS, WARM_UP = 50, 5, 50
PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
SYNTHETIC = {"name": "benchmarks.synthetic:images", "num_classes": 10, "residency": "device"}
MODELS = {"small_resnet": SYNTHETIC, "mnist_cnn": {"name": "mnist"}}


def measure(rounds: int | None = None) -> list[Row]:
    """Each precision in processes of its own, since Accelerate keeps the first one for good."""
    reason = detect_topology(os.environ).gpu_reason
    if reason is not None:
        return [not_measured("gpu", f"torch would see no GPU here: {reason}")]
    return [row for model in MODELS for row in measure_model(model, "cuda", rounds or ROUNDS)]


def measure_model(model: str, device: str, rounds: int) -> list[Row]:
    """Each precision against fp32."""
    variants: dict[str, Callable[[], float]] = {
        name: partial(rate_of, config_of(model, precision, device), device) for name, precision in PRECISIONS.items()
    }
    measured = in_turn(variants, rounds)
    return [ratio_row(f"gpu/{model}-{name}", measured, name, "fp32", "images/s") for name in ("bf16", "fp16")]


def config_of(model: str, precision: str, device: str) -> dict[str, Any]:
    """A job in steady state."""
    return {
        "global_batch_size": BATCH,
        "max_epochs": 1_000_000,
        "mixed_precision": precision,
        "device": device,
        "data": MODELS[model],
        "model": {"name": model},
        "optim": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
        "eval": {"every_epochs": None},
        "checkpoint": {"every_epochs": None},
    }


def rate_of(config: dict[str, Any], device: str) -> float:
    """Images/s of a job in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        run_python(["-m", "benchmarks.gpu", folder, device])
        return float((Path(folder) / "rate").read_text(encoding="ascii"))


def measure_rate(folder: Path, device: str) -> None:
    """That process: write the median of a few blocks."""
    from benchmarks.jobs import batches_of, build_job, take_steps, wait_for
    from configs.schema import RunConfig

    config = RunConfig.model_validate(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    job = build_job(config, folder, device=device)
    batches = batches_of(job)
    take_steps(job, batches, WARM_UP)
    rates = []
    for _ in range(BLOCKS):
        wait_for(job.context.device)
        start, seen = time.perf_counter(), job.state.samples_seen
        take_steps(job, batches, STEPS)
        wait_for(job.context.device)
        rates.append((job.state.samples_seen - seen) / (time.perf_counter() - start))
    (folder / "rate").write_text(str(statistics.median(rates)), encoding="ascii")


if __name__ == "__main__":
    measure_rate(Path(sys.argv[1]), sys.argv[2])
