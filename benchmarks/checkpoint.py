"""What saving costs training: how long it stands still, and how much slower it steps while a checkpoint is written."""

import os
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import ROOT, Row, Target, in_turn, ratio_row
from benchmarks.jobs import STEADY, batches_of, build_job, take_steps, tutorial_config
from trainer.job import Job
from trainer.snapshot import save

OUT = ROOT / "benchmarks" / "out"
ROUNDS = 15
STEPS = 100  # of the tutorial's net; about 60 ms
# 38.4 million weights, 153 MB, and as much momentum: the checkpoint has 307 MB.
LARGE = ("model.name=mlp", 'model.args={"hidden": [4096, 8560]}', "loss.name=cross_entropy", "optim.momentum=0.9")
STALL, PUBLISHED = "training stands still", "until it is published"
TORCH_SAVE = "torch.save in the training's thread"
DURING, WITHOUT = "while a checkpoint is written", "without"


def measure(rounds: int | None = None) -> list[Row]:
    """One process: of as many threads as it gets by default for the large network, of one for the small."""
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as name:  # on a disk: the system's folder for such may be in memory
        large = build_job(tutorial_config(*STEADY, *LARGE), folder_in(name, "large"), threads_per_rank=os.cpu_count())
        take_steps(large, batches_of(large), 1)
        saves = in_turn(
            {STALL: lambda: timed_save(large), TORCH_SAVE: lambda: timed_torch_save(large, Path(name) / "plain.pt")},
            1 + (rounds or ROUNDS),
        )
        saves = {variant: seconds[1:] for variant, seconds in saves.items()}  # the first makes its buffers and files
        small = build_job(tutorial_config(*STEADY), folder_in(name, "small"))
        steps = step_times(small, rounds or ROUNDS)
        for job in (large, small):
            job.tracker.close()  # its thread would write into the folder while that is removed
    measured = {STALL: [stall for stall, _ in saves[STALL]], PUBLISHED: [whole for _, whole in saves[STALL]]}
    measured[TORCH_SAVE] = [seconds for seconds, _ in saves[TORCH_SAVE]]
    return [
        ratio_row("checkpoint/stall", measured, STALL, TORCH_SAVE, "s", Target("<=", 0.1)),
        ratio_row("checkpoint/published", measured, PUBLISHED, TORCH_SAVE, "s"),
        ratio_row("checkpoint/steps", steps, DURING, WITHOUT, "us a step"),
    ]


def folder_in(place: str, name: str) -> Path:
    folder = Path(place) / name
    folder.mkdir()
    return folder


def timed_save(job: Job) -> tuple[float, float]:
    """Seconds until training may go on, and until the checkpoint is published."""
    job.state.count(applied=True, num_samples=0)  # another step, another checkpoint, and an old one that goes
    start = time.perf_counter()
    save(job)
    stall = time.perf_counter() - start
    job.saver.settle()
    return stall, time.perf_counter() - start


def timed_torch_save(job: Job, path: Path) -> tuple[float, float]:
    """Seconds until training may go on, and until it is written, which here are the same: torch.save of the same
    weights and momentum. It checks nothing and does not wait for the disk, as a checkpoint does."""
    start = time.perf_counter()
    torch.save({"model": job.model.state_dict(), "optimizer": list(job.optimizer.state.values())}, path)
    seconds = time.perf_counter() - start
    return seconds, seconds


def step_times(job: Job, rounds: int) -> dict[str, list[float]]:
    """Microseconds a step of blocks that begin just after a save, and of blocks without one."""
    batches = batches_of(job)

    def block(*, saves: bool) -> float:
        if saves:
            save(job)  # of another step each time
        start = time.perf_counter()
        take_steps(job, batches, STEPS)
        seconds = time.perf_counter() - start
        job.saver.settle()
        return 1e6 * seconds / STEPS

    block(saves=True)
    return in_turn({DURING: lambda: block(saves=True), WITHOUT: lambda: block(saves=False)}, rounds)
