"""Lockstep and the frameworks that a user would take instead, on the tutorial's job: rate in steady state, time of the
first step, accuracy. Each in a process of its own, one epoch, one thread, the same net with the clock in it."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import environments
from benchmarks.accuracy import LOCKSTEP, ONE_THREAD, difference_row, final_top1
from benchmarks.harness import ROOT, Row, Target, in_turn, not_measured, ratio_row, run_python
from benchmarks.marked_net import MARKED, MARKS, read_marks
from benchmarks.startup import MARKED_TUTORIAL
from configs.data_section import DataConfig
from trainer.prepare import prepare_data

ROUNDS = 5
BATCH = 64
# Training passes of the first epoch, of 938 (timm: 937), between whose begins the rate is taken.
FIRST, LAST = 101, 901
BEST = "the fastest of them"
EQUAL_WITHIN = 3
"""Standard errors; with two, one of four equal peers would be called different in every fourth run."""


@dataclass(frozen=True)
class Peer:
    """`environment` names the requirements in peers/; None = this project's own environment."""

    name: str
    module: str
    environment: str | None = None


PEERS = (
    Peer("Lightning", "benchmarks.peers.lightning_trainer", "lightning"),
    Peer("Accelerate", "benchmarks.peers.accelerate_example"),
    Peer("timm", "benchmarks.peers.timm_loop", "timm"),
    Peer("torchvision", "benchmarks.peers.torchvision_reference"),
)


@dataclass(frozen=True)
class Epoch:
    """What was measured of one process."""

    first_step_s: float
    """From the start of the process to the end of its first step."""
    samples_per_s: float
    top1: float
    """Of the test split after the epoch, a fraction."""


def measure(rounds: int | None = None) -> list[Row]:
    """All in turn; round i has seed i."""
    prepare_data(DataConfig(root=str(ROOT / "data")))
    with tempfile.TemporaryDirectory() as name:
        variants: dict[str, Callable[[], Epoch]] = {LOCKSTEP: seeded(partial(lockstep_epoch, Path(name)))}
        missing: dict[str, str] = {}
        for peer in PEERS:
            try:
                variants[peer.name] = seeded(partial(peer_epoch, Path(name), peer, interpreter(peer)))
            except environments.NotInstallable as reason:
                missing[peer.name] = str(reason)
        measured = in_turn(variants, rounds or ROUNDS)
    rows = rows_of(measured)
    if missing:  # who is the fastest is known of all of them only
        why = f"{', '.join(missing)} could not be installed"
        rows = [not_measured("frameworks/steady", why) if row.key == "frameworks/steady" else row for row in rows]
    return rows + [not_measured(f"frameworks/{name}", why) for name, why in missing.items()]


def interpreter(peer: Peer) -> str | None:
    """None: the one that runs this."""
    return None if peer.environment is None else environments.python_for(peer.environment)


def seeded(run: Callable[[int], Epoch]) -> Callable[[], Epoch]:
    """Each call with the next seed, from 0."""
    seeds = iter(range(10**6))
    return lambda: run(next(seeds))


def lockstep_epoch(folder: Path, seed: int) -> Epoch:
    name = f"seed-{seed}"
    command = [*MARKED_TUTORIAL, "max_epochs=1", f"seed={seed}", "--runs-dir", str(folder), "--run-name", name]
    return clocked(folder, lambda marks: run_python(command, marks), lambda _: final_top1(folder / name))


def peer_epoch(folder: Path, peer: Peer, python: str | None, seed: int) -> Epoch:
    command = ["-m", peer.module, "--seed", str(seed), "--output", str(folder)]
    answer = {} if python is None else {"python": python}
    return clocked(folder, lambda marks: run_python(command, marks, **answer), answered_top1)


def answered_top1(output: str) -> float:
    """From what a peer's script printed: benchmarks.peers.job.answer."""
    (line,) = [line for line in output.splitlines() if line.startswith('{"top1":')]
    return float(json.loads(line)["top1"])


def clocked(folder: Path, run: Callable[[dict[str, str]], str], top1: Callable[[str], float]) -> Epoch:
    """Run a process, which gets the environment of the clock and one thread; `top1` reads it from the output."""
    marks = folder / "marks"
    start = time.time()
    output = run({MARKS: str(marks), MARKED: f"2,{FIRST},{LAST}"} | ONE_THREAD)
    times = read_marks(marks)
    marks.unlink()
    rate = (LAST - FIRST) * BATCH / (times[LAST] - times[FIRST])
    return Epoch(times[2] - start, rate, top1(output))


def rows_of(measured: Mapping[str, Sequence[Epoch]]) -> list[Row]:
    """Against the fastest of each round, then against each."""
    peers = [name for name in measured if name != LOCKSTEP]
    rates = {name: [epoch.samples_per_s for epoch in epochs] for name, epochs in measured.items()}
    starts = {name: [epoch.first_step_s for epoch in epochs] for name, epochs in measured.items()}
    top1 = {name: [epoch.top1 for epoch in epochs] for name, epochs in measured.items()}
    rates[BEST] = [max(in_a_round) for in_a_round in zip(*(rates[name] for name in peers), strict=True)]
    rows = [ratio_row("frameworks/steady", rates, LOCKSTEP, BEST, "samples/s", Target(">=", 6))]
    for name in peers:
        key = f"frameworks/{name}"
        rows.append(ratio_row(key, rates, LOCKSTEP, name, "samples/s"))
        rows.append(ratio_row(f"{key}-start", starts, LOCKSTEP, name, "s to the end of the first step"))
        rows.append(difference_row(top1[LOCKSTEP], top1[name], f"{key}-top1", name, EQUAL_WITHIN))
    return rows
