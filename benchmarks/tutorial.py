"""Steady state of the tutorial's job at batch 64 on one thread: its own loop, Lockstep, a loop written by hand, and the
limit."""

import contextlib
import io
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import tutorial_script
from benchmarks.harness import Row, Target, in_turn, ratio_row
from benchmarks.jobs import STEADY, batches_of, build_job, take_steps, tutorial_config
from trainer.job import Job

BATCH = 64
LR = 0.003
STEPS = 100  # of a block: 0.1 s and two log points of Lockstep's
WARM_UP = 5  # steps before each block, which bring the caches back
ROUNDS = 150
SCRIPT_ROUNDS = 20  # a block of the script takes ten times as long

LOCKSTEP, SCRIPT = "Lockstep", "tutorial's loop"
BY_HAND = "by hand, with torch.optim.SGD"
LIMIT, AGAIN, FLOATS = "bare loop", "bare loop again", "bare loop, normalised beforehand"
UNIT = "samples/s"


@dataclass(frozen=True)
class Rate:
    """Samples/s of one block, by the clock on the wall and by the processor time of this process."""

    wall: float
    cpu: float


def measure(rounds: int | None = None) -> list[Row]:
    """Lockstep against the tutorial's loop, one by hand and the bare one; that against itself shows the noise."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        job = build_job(tutorial_config(*STEADY), Path(folder))
        check_arithmetic(job)
        variants = _variants(job)
        in_turn(variants, 1)
        slow = in_turn(_only(variants, SCRIPT, LOCKSTEP), rounds or SCRIPT_ROUNDS)
        fast = in_turn(_only(variants, LOCKSTEP, BY_HAND, LIMIT, FLOATS, AGAIN), rounds or ROUNDS)
        job.tracker.close()
    return [
        ratio_row("tutorial/script", _wall(slow), LOCKSTEP, SCRIPT, UNIT, Target(">=", 6)),
        ratio_row("tutorial/by-hand", _wall(fast), LOCKSTEP, BY_HAND, UNIT, Target(">=", 0.95)),
        ratio_row("tutorial/limit", _wall(fast), LOCKSTEP, LIMIT, UNIT, Target(">=", 0.95)),
        ratio_row("tutorial/limit-cpu", _cpu(fast), LOCKSTEP, LIMIT, f"{UNIT} of CPU time"),
        ratio_row("tutorial/floats", _wall(fast), LOCKSTEP, FLOATS, UNIT),
        ratio_row("tutorial/noise", _wall(fast), AGAIN, LIMIT, UNIT),
    ]


def _only(variants: Mapping[str, Callable[[], Rate]], *names: str) -> dict[str, Callable[[], Rate]]:
    return {name: variants[name] for name in names}


def _wall(measured: Mapping[str, list[Rate]]) -> dict[str, list[float]]:
    return {name: [rate.wall for rate in rates] for name, rates in measured.items()}


def _cpu(measured: Mapping[str, list[Rate]]) -> dict[str, list[float]]:
    return {name: [rate.cpu for rate in rates] for name, rates in measured.items()}


def _variants(job: Job) -> dict[str, Callable[[], Rate]]:
    """Name -> a function that takes one block of steps."""
    batches = batches_of(job)
    images, labels = job.source.images, job.source.labels
    return {
        SCRIPT: block(script_steps(job.config.data.root)),
        LOCKSTEP: lambda: timed(lambda steps: take_steps(job, batches, steps)),
        BY_HAND: block(steps_by_hand(bare_model(job), images, labels)),
        LIMIT: block(bare_steps(bare_model(job), images, labels, normalise)),
        FLOATS: block(bare_steps(bare_model(job), normalise(images), labels, lambda batch: batch)),
        AGAIN: block(bare_steps(bare_model(job), images, labels, normalise)),
    }


def timed(take: Callable[[int], None]) -> Rate:
    """The rate of one block."""
    take(WARM_UP)
    wall, cpu = time.perf_counter(), time.process_time()
    take(STEPS)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Rate(STEPS * BATCH / wall, STEPS * BATCH / cpu)


def block(steps: Iterator[float]) -> Callable[[], Rate]:
    """A loop that yields after each step, as blocks of it."""
    return lambda: timed(lambda count: consume(steps, count))


def consume(steps: Iterator[float], count: int) -> None:
    for _ in itertools.islice(steps, count):
        pass


def script_steps(root: str) -> Iterator[float]:
    """The tutorial's loop; yields the loss after each step."""
    model, criterion, optimizer = tutorial_script.build()
    loader = tutorial_script.load(root, train=True)
    while True:
        for images, labels in loader:
            yield tutorial_script.train_batch(model, criterion, optimizer, images, labels)


def bare_model(job: Job) -> nn.Module:
    """The tutorial's own model, with the weights that the job has now."""
    model, _, _ = tutorial_script.build()
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), job.model.parameters(), strict=True):
            ours.copy_(theirs)
    return model


def normalise(images: Tensor) -> Tensor:
    """uint8 to what ToTensor and Normalize((0.5,), (0.5,)) give."""
    return images.to(torch.float32).div_(255).sub_(0.5).div_(0.5)


def steps_by_hand(model: nn.Module, images: Tensor, labels: Tensor) -> Iterator[float]:
    """What one would write: torch's optimizer, all data in memory, batches by index. Yields the loss after a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, fused=True)
    while True:
        permutation = torch.randperm(len(images))
        for start in range(0, len(images), BATCH):
            ids = permutation[start : start + BATCH]
            loss = F.nll_loss(model(normalise(images[ids])), labels[ids])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()


def bare_steps(
    model: nn.Module, images: Tensor, labels: Tensor, prepare: Callable[[Tensor], Tensor]
) -> Iterator[float]:
    """The limit of eager torch: the network, the loss, autograd's engine and the optimizer's kernel, and nothing around
    them. Yields the loss after each step."""
    parameters = list(model.parameters())
    while True:
        for ids in torch.randperm(len(images)).split(BATCH):
            yield bare_step(model, parameters, prepare(images.index_select(0, ids)), labels.index_select(0, ids))


_ONE = torch.ones(())
_run_backward = torch.autograd.Variable._execution_engine.run_backward


def bare_step(model: nn.Module, parameters: list[nn.Parameter], images: Tensor, labels: Tensor) -> float:
    loss = F.nll_loss(model(images), labels)
    _run_backward((loss,), (_ONE,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    gradients = [p.grad for p in parameters if p.grad is not None]
    settings: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
    torch._fused_sgd_(list[Tensor](parameters), gradients, [], lr=LR, maximize=False, is_first_step=False, **settings)
    for parameter in parameters:
        parameter.grad = None
    return loss.item()


def check_arithmetic(job: Job, steps: int = 10) -> None:
    """Both loops must make the same weights of the same batches: only then is it their speed that is compared."""
    model = bare_model(job)
    parameters = list(model.parameters())
    for _, [(images, labels)] in itertools.islice(batches_of(job), steps):
        bare_step(model, parameters, normalise(images), labels)
    take_steps(job, batches_of(job), steps)
    for ours, theirs in zip(job.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
