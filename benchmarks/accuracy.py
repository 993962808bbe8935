"""The whole tutorial job by both real commands over several seeds: equal accuracy, and the time from start to exit."""

import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import ROOT, Row, Target, in_turn, ratio_row, run_python
from configs.data_section import DataConfig
from trainer.prepare import prepare_data

SEEDS = 5
LOCKSTEP, SCRIPT = "Lockstep", "tutorial's script"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def measure(rounds: int | None = None) -> list[Row]:
    """One round a seed."""
    prepare_data(DataConfig(root=str(ROOT / "data")))
    top1: dict[str, list[float]] = {LOCKSTEP: [], SCRIPT: []}
    with tempfile.TemporaryDirectory() as runs:
        variants: dict[str, Callable[[], float]] = {
            SCRIPT: lambda: _timed(lambda seed: script_top1(seed), top1[SCRIPT]),
            LOCKSTEP: lambda: _timed(lambda seed: lockstep_top1(seed, Path(runs)), top1[LOCKSTEP]),
        }
        walls = in_turn(variants, rounds or SEEDS)
    wall = ratio_row("accuracy/wall", walls, LOCKSTEP, SCRIPT, "s, start to exit, one thread", Target("<=", 1 / 6))
    return [difference_row(top1[LOCKSTEP], top1[SCRIPT]), wall]


def _timed(run: Callable[[int], float], results: list[float]) -> float:
    """Run the next seed, keep its accuracy; returns the seconds."""
    start = time.perf_counter()
    results.append(run(len(results)))
    return time.perf_counter() - start


def script_top1(seed: int) -> float:
    text = run_python(["benchmarks/tutorial_script.py", "--seed", str(seed)], ONE_THREAD)
    found = re.search(r"Test accuracy: ([\d.]+)", text)
    assert found, text
    return float(found[1])


def lockstep_top1(seed: int, runs: Path) -> float:
    command = ["-m", "launch", "train", "configs/tutorial.yaml", f"seed={seed}", "launch.num_threads=1"]
    run_python([*command, "--runs-dir", str(runs), "--run-name", f"seed-{seed}"], ONE_THREAD)
    return final_top1(runs / f"seed-{seed}")


def final_top1(run: Path) -> float:
    """Of a finished run of Lockstep's; a fraction."""
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    return float(result["metrics"]["eval/top1"])


def difference_row(
    ours: Sequence[float],
    theirs: Sequence[float],
    key: str = "accuracy/top1",
    versus: str = SCRIPT,
    errors: int = 2,
) -> Row:
    """Equal within seed noise: the means differ by at most so many standard errors of their difference."""
    difference = statistics.mean(ours) - statistics.mean(theirs)
    error = standard_error(ours, theirs)
    return Row(
        key=key,
        subject=f"{LOCKSTEP}: {_percent(ours)}",
        versus=f"{versus}: {_percent(theirs)}",
        result=f"{100 * difference:+.3f} points, standard error {100 * error:.3f}",
        value=difference,
        target=f"within {errors} standard errors",
        is_met=abs(difference) <= errors * error if math.isfinite(error) else None,
        pairs=len(ours),
        details={LOCKSTEP: list(ours), versus: list(theirs), "standard_error": error},
    )


def standard_error(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of the difference of the two means; without end where there is one seed only, for nothing is known then."""
    if len(ours) < 2:
        return math.inf
    return math.sqrt(statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs))


def _percent(values: Sequence[float]) -> str:
    deviation = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.2f}{deviation} % top-1"
