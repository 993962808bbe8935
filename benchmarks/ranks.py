"""From the command to the end of the first training step, of several ranks on this machine: Lockstep against torchrun
with a plain script that does the same."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.accuracy import ONE_THREAD
from benchmarks.harness import ROOT, Row, Target, in_turn, ratio_row
from benchmarks.startup import LENGTH, MARKED_TUTORIAL, first_step_s
from configs.data_section import DataConfig
from trainer.prepare import prepare_data

ROUNDS = 5
TARGETS = {2: Target("<=", 0.6), 4: Target("<=", 0.45)}
"""Ranks -> at most so much of torchrun's time."""
BACKENDS: dict[str, tuple[str, ...]] = {"torchrun": ("--launcher", "torchrun"), "fork": ("--launcher", "fork")}
"""Ways in which Lockstep starts its ranks -> what the command says for each; all are measured."""
PLAIN = "torchrun, plain script"


def measure(rounds: int | None = None) -> list[Row]:
    """Whole processes in turn, one thread a rank."""
    prepare_data(DataConfig(root=str(ROOT / "data")))
    return [row for ranks in TARGETS for row in measure_ranks(ranks, rounds or ROUNDS)]


def measure_ranks(ranks: int, rounds: int) -> list[Row]:
    """One row a backend."""
    with tempfile.TemporaryDirectory() as name:
        commands = {PLAIN: plain_command(ranks)}
        commands |= {f"Lockstep, {backend}": lockstep_command(ranks, backend, name) for backend in BACKENDS}
        variants: dict[str, Callable[[], float]] = {
            variant: partial(first_step_s, command, Path(name), ONE_THREAD) for variant, command in commands.items()
        }
        in_turn(variants, 1)  # files into the page cache, bytecode to the disk
        measured = in_turn(variants, rounds)
    return [
        ratio_row(
            f"ranks/{ranks}-{backend}",
            measured,
            f"Lockstep, {backend}",
            PLAIN,
            "s",
            TARGETS[ranks] if backend == "fork" else None,
        )
        for backend in BACKENDS
    ]


def lockstep_command(ranks: int, backend: str, runs: str) -> list[str]:
    return [*MARKED_TUTORIAL, *LENGTH, "--nproc", str(ranks), *BACKENDS[backend], "--runs-dir", runs]


def plain_command(ranks: int) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, "-m", "benchmarks.peers.torchrun_script"]
