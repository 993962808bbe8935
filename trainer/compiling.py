"""compile: auto: a step with and without torch.compile, measured before the ranks start."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from configs.contract import WorkerPlan
from configs.derive import counted, steps_per_epoch, total_steps
from configs.errors import first_line
from trainer.job import Job
from trainer.probe import build_alone
from trainer.timing import timed_step

MOST_SAVED = 0.5
"""Of a step, by compiling: what it has to bring in for the measurement to be worth its time."""
LEAST_COMPILE_S = 10.0
"""A cold compile takes 30 s for the tutorial's net and 50 s for ResNet-18 on two cores; a warm one 2 s."""
NO_GAIN = 0.95
"""Less than this is within what one measurement differs from the next."""
WARM_UP, MOST_STEPS, LONG_ENOUGH_S = 3, 30, 6.0


def measure_compile(plan: WorkerPlan) -> dict[str, Any]:
    """`compile`: whether it pays; `why`: the reason, with the numbers. Of one process with one rank's share."""
    # A learning rate of zero: the weights stay as they are, and finite.
    still = {"optim": plan.config.optim.model_copy(update={"lr": 0.0}), "compile": False}
    size, drop_last = plan.batches.global_batch_size, plan.config.drop_last
    with build_alone(plan, **still) as job:
        steps = total_steps(plan.config, steps_per_epoch(job.facts["num_train"], size, drop_last=drop_last))
        try:
            pays, why = _compare(job, steps, plan.config.max_time_s)
        except Exception as error:  # no compiler, a network that cannot be compiled, no memory: it goes without
            pays, why = False, f"the measurement failed: {type(error).__name__}: {first_line(error)}"
    return {"compile": pays, "why": f"auto: {why}"}


def _compare(job: Job, steps: int, max_time_s: float | None) -> tuple[bool, str]:
    batches = job.source.training(job.order.batches(0, 0))
    eager_s = statistics.median(timed_step(job, *next(batches)) for _ in range(2 * WARM_UP))
    if max_time_s is not None:
        steps = min(steps, int(max_time_s / eager_s))
    if not can_pay(eager_s, steps):
        return False, f"{counted(steps, 'step')} of {1000 * eager_s:.3g} ms are too few to pay for compiling"
    job.model.compile()
    job.is_compiled = True
    warm_up_s = sum(timed_step(job, *next(batches)) for _ in range(WARM_UP))
    eager_s, compiled_s = _in_turn(job, batches)
    return judge(eager_s, compiled_s, max(0.0, warm_up_s - WARM_UP * compiled_s), steps)


def _in_turn(job: Job, batches: Iterator[Any]) -> tuple[float, float]:
    """Seconds of a step without and with the compiled network, the medians; in turn, for the machine may get slower."""
    eager: list[float] = []
    compiled: list[float] = []
    until = time.monotonic() + LONG_ENOUGH_S
    while len(eager) < 3 or (len(eager) < MOST_STEPS and time.monotonic() < until):
        with torch.compiler.set_stance("force_eager"):
            eager.append(timed_step(job, *next(batches)))
        compiled.append(timed_step(job, *next(batches)))
    return statistics.median(eager), statistics.median(compiled)


def can_pay(eager_s: float, steps: int) -> bool:
    return MOST_SAVED * eager_s * steps > LEAST_COMPILE_S


def judge(eager_s: float, compiled_s: float, compile_s: float, steps: int) -> tuple[bool, str]:
    """Whether `steps` that take `compiled_s` in place of `eager_s` bring in the seconds of the compilation, and why."""
    times = f"{1000 * compiled_s:.3g} ms a step, {1000 * eager_s:.3g} without"
    if compiled_s > NO_GAIN * eager_s:
        return False, f"no gain, {times}"
    saved_s = (eager_s - compiled_s) * steps
    sums = f"{times}: {counted(steps, 'step')} save {saved_s:.0f} s, compiling takes {compile_s:.0f} s"
    return saved_s > compile_s, sums
