"""How long a typo takes to be told: `launch plan` with a misspelt setting, against `torchrun --help`."""

import time
from collections.abc import Callable
from functools import partial

from benchmarks.harness import Row, Target, in_turn, ratio_row, run_python

ROUNDS = 15
TYPO, HELP = "launch plan with a typo", "torchrun --help"
PLAN = ("-m", "launch", "plan", "configs/tutorial.yaml", "optim.lrr=0.1")
EXIT_CONFIGURATION = 2


def measure(rounds: int | None = None) -> list[Row]:
    """Whole processes in turn, after one of each that warms the caches."""
    variants: dict[str, Callable[[], float]] = {
        TYPO: partial(command_s, PLAN, EXIT_CONFIGURATION, "optim.lrr"),
        HELP: partial(command_s, ("-m", "torch.distributed.run", "--help"), 0, "--nproc-per-node"),
    }
    in_turn(variants, 1)
    measured = in_turn(variants, rounds or ROUNDS)
    return [ratio_row("cli/typo", measured, TYPO, HELP, "s", Target("<=", 0.15))]


def command_s(arguments: tuple[str, ...], expected: int, said: str) -> float:
    """Seconds of the whole process; it must have said that."""
    start = time.perf_counter()
    output = run_python(arguments, expected=expected)
    seconds = time.perf_counter() - start
    if said not in output:
        raise RuntimeError(f"{' '.join(arguments)} does not say {said}: {output[-300:]}")
    return seconds
