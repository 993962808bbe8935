"""From the last training step to the end of the command: the last evaluation, checkpoint and summary, and the end of
the processes. Against Accelerate's example, which evaluates and saves too."""

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.accuracy import LOCKSTEP, ONE_THREAD
from benchmarks.harness import ROOT, Row, Target, in_turn, ratio_row, run_python
from benchmarks.marked_net import MARKED, MARKS, read_marks
from benchmarks.startup import MARKED_TUTORIAL
from configs.data_section import DataConfig
from configs.run_dir import RunDir
from trainer import checkpoint
from trainer.prepare import prepare_data

ROUNDS = 7
STEPS = 200
ACCELERATE = "Accelerate's example"


def measure(rounds: int | None = None) -> list[Row]:
    """Whole processes in turn, one thread each."""
    prepare_data(DataConfig(root=str(ROOT / "data")))
    with tempfile.TemporaryDirectory() as name:
        variants: dict[str, Callable[[], float]] = {
            LOCKSTEP: partial(lockstep_exit_s, Path(name)),
            ACCELERATE: partial(exit_s, ["-m", "benchmarks.peers.accelerate_example", *example(name)], Path(name)),
        }
        measured = in_turn(variants, rounds or ROUNDS)
    return [ratio_row("exit/last-step", measured, LOCKSTEP, ACCELERATE, "s", limit=Target("<=", 0.3))]


def example(output: str) -> tuple[str, ...]:
    return ("--steps", str(STEPS), "--output", output)


def exit_s(arguments: list[str], folder: Path) -> float:
    """Seconds from the begin of the last step, which takes a millisecond, to the end of the command."""
    marks = folder / "marks"
    run_python(arguments, {MARKS: str(marks), MARKED: str(STEPS)} | ONE_THREAD)
    end = time.time()
    seconds = end - read_marks(marks)[STEPS]
    marks.unlink()
    return seconds


def lockstep_exit_s(folder: Path) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        return exit_of_run(RunDir(Path(runs) / "one"), folder)


def exit_of_run(run: RunDir, folder: Path) -> float:
    """exit_s() of a new run."""
    place = ("--runs-dir", str(run.path.parent), "--run-name", run.path.name)
    seconds = exit_s([*MARKED_TUTORIAL, "max_epochs=null", f"max_steps={STEPS}", *place], folder)
    check_saved(run)
    return seconds


def check_saved(run: RunDir) -> None:
    """A fast end counts only if nothing was lost: checkpoint, log and result are of the last step."""
    newest = checkpoint.newest_valid(run.checkpoints, lambda path, reason: None)
    logged = json.loads(run.metrics.read_text(encoding="utf-8").splitlines()[-1])["step"]
    result = json.loads(run.result.read_text(encoding="utf-8"))["step"]
    found = (newest and newest.name, logged, result)
    if found != (f"step_{STEPS:08d}", STEPS, STEPS):
        raise RuntimeError(f"the run ended after {STEPS} steps with checkpoint, log and result of {found}")
