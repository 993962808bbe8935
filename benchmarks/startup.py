"""From the start of the process to the end of the first training step: Lockstep's command and an Accelerate script."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Row, Target, in_turn, ratio_row, run_python
from benchmarks.marked_net import MARKS, read_marks
from configs.data_section import DataConfig
from trainer.prepare import prepare_data

ROUNDS = 7
LOCKSTEP, ACCELERATE = "Lockstep", "Accelerate script"
MARKED_TUTORIAL = ("-m", "launch", "train", "configs/tutorial.yaml", "model.name=benchmarks.marked_net:MarkedNet")
MARKED_TUTORIAL += ("model.args={}", "loss.name=cross_entropy")
LENGTH = ("max_epochs=null", "max_steps=2")


def measure(rounds: int | None = None) -> list[Row]:
    """Whole processes in turn, with the same model and data; both may use all cores."""
    prepare_data(DataConfig(root=str(ROOT / "data")))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lockstep = [*MARKED_TUTORIAL, *LENGTH, "--runs-dir", name]
        variants: dict[str, Callable[[], float]] = {
            LOCKSTEP: partial(first_step_s, lockstep, folder),
            ACCELERATE: partial(first_step_s, ["-m", "benchmarks.accelerate_script"], folder),
        }
        for variant in variants.values():
            variant()  # files into the page cache, bytecode to the disk
        measured = in_turn(variants, rounds or ROUNDS)
    return [ratio_row("startup/first-step", measured, LOCKSTEP, ACCELERATE, "s", Target("<=", 1.0))]


def first_step_s(arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> float:
    """Run the command to its end; returns the seconds from its start to the end of its model's first step."""
    marks = folder / "marks"
    start = time.time()
    run_python(arguments, {MARKS: str(marks)} | (environment or {}))
    seconds = read_marks(marks)[2] - start
    marks.unlink()
    return seconds
