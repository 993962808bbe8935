"""configs/mnist.yaml to 99.4 %, against the same net and recipe in fp32 through Accelerate's example loop."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.accuracy import LOCKSTEP, final_top1
from benchmarks.frameworks import answered_top1
from benchmarks.harness import ROOT, Row, Target, in_turn, ratio_row, run_python, spread
from configs.data_section import DataConfig
from trainer.prepare import prepare_data

ROUNDS = 3
GOAL = 0.994
ACCELERATE = "Accelerate, fp32"
Ended = tuple[float, float]
"""Seconds from start to exit, and the test accuracy."""


def measure(rounds: int | None = None) -> list[Row]:
    """Whole processes in turn; round i has seed i. Both use all cores: two loader workers are the peer's own."""
    prepare_data(DataConfig(root=str(ROOT / "data")))
    with tempfile.TemporaryDirectory() as name:
        runs = Path(name)
        variants = {LOCKSTEP: timed(lambda seed: lockstep_top1(seed, runs)), ACCELERATE: timed(accelerate_top1)}
        ended = in_turn(variants, rounds or ROUNDS)
    walls = {variant: [seconds for seconds, _ in endings] for variant, endings in ended.items()}
    top1 = {variant: [accuracy for _, accuracy in endings] for variant, endings in ended.items()}
    unit = "s, start to exit, all cores"
    wall = ratio_row("mnist/wall", walls, LOCKSTEP, ACCELERATE, unit, Target("<=", 1 / 3))
    return [wall, goal_row(top1[LOCKSTEP], top1[ACCELERATE])]


def timed(run: Callable[[int], float]) -> Callable[[], Ended]:
    """Each call with the next seed, from 0."""
    seeds = iter(range(10**6))

    def once() -> Ended:
        start = time.perf_counter()
        top1 = run(next(seeds))
        return time.perf_counter() - start, top1

    return once


def lockstep_top1(seed: int, runs: Path) -> float:
    name = f"seed-{seed}"
    command = ["-m", "launch", "train", "configs/mnist.yaml", f"seed={seed}"]
    run_python([*command, "--runs-dir", str(runs), "--run-name", name])
    return final_top1(runs / name)


def accelerate_top1(seed: int) -> float:
    return answered_top1(run_python(["-m", "benchmarks.peers.accelerate_mnist", "--seed", str(seed)]))


def goal_row(ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """Time to an accuracy counts only where the accuracy was reached, by every run of either side."""
    lowest = min(*ours, *theirs)
    return Row(
        key="mnist/top1",
        subject=f"{LOCKSTEP}: {spread([100 * value for value in ours]).show()} % top-1",
        versus=f"{ACCELERATE}: {spread([100 * value for value in theirs]).show()} % top-1",
        result=f"lowest {100 * lowest:.2f} %",
        value=lowest,
        target=f">= {100 * GOAL:g} %",
        is_met=lowest >= GOAL,
        pairs=len(ours),
        details={LOCKSTEP: list(ours), ACCELERATE: list(theirs)},
    )
