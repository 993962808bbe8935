"""Where the time of a workload goes: `python -m benchmarks.profiles tutorial mnist ...`, one table for each.

Of a step: the operators' own time by torch.profiler, or with Python's functions in it by cProfile, which adds to these.
Of the start: the milliseconds that each package takes to import. Of the end: what the run's own account says.
"""

import contextlib
import cProfile
import io
import json
import pstats
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.checkpoint import LARGE, OUT, timed_save
from benchmarks.ddp import resnet_config
from benchmarks.exit import ONE_THREAD, exit_of_run
from benchmarks.harness import ROOT, run_python
from benchmarks.jobs import STEADY, batches_of, build_job, take_steps, tutorial_config
from benchmarks.jpegs import photographs
from benchmarks.photograph_batches import batches, photographs_config
from benchmarks.unrolled import SETTINGS, steps_in_groups
from configs.loader import load_config
from configs.run_dir import RunDir
from configs.schema import RunConfig

ROWS = 12
Shares = list[tuple[str, float]]
"""Names, and percent or milliseconds; the largest first."""
Profiler = Callable[[Callable[[], object]], Shares]
_IMPORT = re.compile(r"import time: +(\d+) \| +\d+ \| +([\w]+)")


def steps_of(config: RunConfig, steps: int, profile: Profiler, threads: int = 1) -> Shares:
    """Of steps of the real job, after as many that are not looked at."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        job = build_job(config, Path(folder), threads_per_rank=threads)
        ready = batches_of(job)
        take = steps_in_groups(job) if config.steps_per_execution > 1 else partial(take_steps, job, ready)
        take(steps)
        shares = profile(lambda: take(steps))
        job.tracker.close()
    return shares


def by_function(work: Callable[[], object]) -> Shares:
    """Percent of all own time."""
    profile = cProfile.Profile()
    profile.runcall(work)
    own = {_name(*key): values[2] for key, values in pstats.Stats(profile).stats.items()}  # type: ignore[attr-defined]
    return in_percent(own)


def _name(file: str, line: int, function: str) -> str:
    return function if file == "~" else f"{Path(file).name}:{line} {function}"


def by_operator(work: Callable[[], object]) -> Shares:
    """Percent of all own time on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return in_percent({event.key: event.self_cpu_time_total for event in profile.key_averages()})


def in_percent(times: dict[str, float]) -> Shares:
    total = sum(times.values())
    return [(name, 100 * own / total) for name, own in Counter(times).most_common(ROWS)]


def saving() -> Shares:
    """Of the thread that trains, while it stands still for 307 MB and until they are published."""
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            job = build_job(tutorial_config(*STEADY, *LARGE), Path(folder), threads_per_rank=2)
        take_steps(job, batches_of(job), 1)
        timed_save(job)
        shares = by_function(lambda: [timed_save(job) for _ in range(5)])
        job.tracker.close()
    return shares


def reading() -> Shares:
    """Of photographs, in one process."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            job = build_job(photographs_config(str(photographs()), num_workers=0), Path(folder))
        ready = batches(job)
        next(ready)
        return by_function(lambda: [next(ready) for _ in range(10)])


def starting() -> Shares:
    """Milliseconds of import by package, in launcher and worker together."""
    with tempfile.TemporaryDirectory() as runs:
        job = ["-m", "launch", "train", "configs/tutorial.yaml", "max_epochs=null", "max_steps=2", "--runs-dir", runs]
        printed = run_python(job, {"PYTHONPROFILEIMPORTTIME": "1"} | ONE_THREAD)
    times: Counter[str] = Counter()
    for microseconds, package in _IMPORT.findall(printed):
        times[package] += int(microseconds) / 1000
    return times.most_common(ROWS)


def ending() -> Shares:
    """Milliseconds from the last of 200 steps to the end of the command."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder) / "one")
        whole = exit_of_run(run, Path(folder))
        account = json.loads(run.result.read_text(encoding="utf-8"))["time"]
    parts = {"evaluation": account["evaluation_s"], "checkpoint": account["checkpoints_s"]}
    parts["the rest: result, the ends of the worker and the launcher"] = whole - sum(parts.values())
    return [(name, 1000 * seconds) for name, seconds in parts.items()]


def _mnist() -> RunConfig:
    return load_config(ROOT / "configs/mnist.yaml", [f"data.root={ROOT / 'data'}", *STEADY]).config


PROFILES: dict[str, tuple[str, Callable[[], Shares]]] = {
    "tutorial": ("%", lambda: steps_of(tutorial_config(*STEADY), 2000, by_function)),
    "tutorial-operators": ("%", lambda: steps_of(tutorial_config(*STEADY), 500, by_operator)),
    "unrolled": ("%", lambda: steps_of(tutorial_config(*SETTINGS), 2000, by_function)),
    "mnist": ("%", lambda: steps_of(_mnist(), 20, by_operator, threads=2)),
    "ddp": ("%", lambda: steps_of(resnet_config(), 10, by_operator)),
    "photographs": ("%", reading),
    "checkpoint": ("%", saving),
    "start": ("ms", starting),
    "exit": ("ms", ending),
}


def main(names: list[str]) -> None:
    """Each of several in a process of its own: of precision and threads there is one of a process."""
    if len(names) == 1:
        show(names[0])
        return
    for name in names or PROFILES:
        subprocess.run([sys.executable, "-m", "benchmarks.profiles", name], cwd=ROOT, check=True)


def show(name: str) -> None:
    unit, measure = PROFILES[name]
    print(f"\n{name}, {unit}")
    for part, value in measure():
        print(f"{value:8.1f}  {part}")


if __name__ == "__main__":
    main(sys.argv[1:])
