"""Images/s of a real job in steady state, in a process of its own: `python -m benchmarks.gpu_rate FOLDER DEVICE` reads
FOLDER/config.json and writes FOLDER/rate.json. Accelerate keeps a process's first precision for good."""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import run_python

STEPS, BLOCKS = 50, 5


class Rate(NamedTuple):
    """Of training steps."""

    images_per_s: float
    mfu: float | None
    """Counted FLOPs as a share of the chip's peak; None where that is not known."""


def rate_of(config: dict[str, Any], device: str, steps: int = STEPS) -> Rate:
    """Of the job of this configuration, in blocks of `steps`."""
    with tempfile.TemporaryDirectory() as folder:
        content = {"config": config, "steps": steps}
        (Path(folder) / "config.json").write_text(json.dumps(content), encoding="utf-8")
        run_python(["-m", "benchmarks.gpu_rate", folder, device])
        return Rate(*json.loads((Path(folder) / "rate.json").read_text(encoding="utf-8")))


def measure_rate(folder: Path, device: str) -> None:
    """The median of a few blocks of steps, after one that warms up."""
    from benchmarks.jobs import batches_of, build_job, take_steps, wait_for
    from configs.schema import RunConfig
    from trainer.speed import count_speed

    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = RunConfig.model_validate(content["config"])
    job = build_job(config, folder, device=device)
    batches, steps = batches_of(job), content["steps"]
    take_steps(job, batches, steps)
    rates = []
    for _ in range(BLOCKS):
        wait_for(job.context.device)
        start, seen = time.perf_counter(), job.state.samples_seen
        take_steps(job, batches, steps)
        wait_for(job.context.device)
        rates.append((job.state.samples_seen - seen) / (time.perf_counter() - start))
    rate = statistics.median(rates)
    (folder / "rate.json").write_text(json.dumps([rate, count_speed(job).metrics(rate).get("perf/mfu")]))


if __name__ == "__main__":
    measure_rate(Path(sys.argv[1]), sys.argv[2])
