"""Runs the real worker in forked ranks over gloo: 0.1 s a rank where torchrun takes 5."""

import itertools
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch._dynamo
import torch.utils.tensorboard  # noqa: F401  # both are imported late by the worker: here once for all forks
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from configs.contract import Outcome, WorkerPlan
from configs.run_dir import AttemptDir, RunDir
from configs.schema import RunConfig
from trainer import checkpoint
from trainer.__main__ import main
from trainer.runtime import RunContext

T = TypeVar("T")

TINY = {
    "global_batch_size": 8,
    "max_epochs": 2,
    "mixed_precision": "no",
    "device": "cpu",
    "data": {"name": "tests.dist.toys:images", "num_classes": 4, "residency": "device"},
    "model": {"name": "mlp", "args": {"hidden": [16]}},
    "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "log": {"every_steps": 1},
    "eval": {"batch_size": 5},
    "launch": {"collective_timeout_s": 60.0},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with the dotted keys of `changes` set; None removes a top-level key that is not wanted."""
    result: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        section = result
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return result


def tiny_config(**changes: Any) -> RunConfig:
    """TINY with changes; `__` in a name stands for the dot: optim__lr=0.2."""
    return RunConfig.model_validate(merged(TINY, {key.replace("__", "."): value for key, value in changes.items()}))


def fork(body: Callable[[], int]) -> int:
    """Run `body` in a forked process that exits with its result; returns the process id."""
    assert threading.active_count() == 1, f"forking with threads: {threading.enumerate()}"
    pid = os.fork()
    if pid:
        return pid
    # pytest's own stand-ins do not write to these descriptors, which the worker points at its log.
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    warnings.filterwarnings("default", message="fp16 on a CPU")  # the one that the worker gives on purpose
    warnings.showwarning = _show_warning
    try:
        code = body()
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


def exit_statuses(pids: list[int]) -> list[int]:
    """Wait for all: >= 0 exit code, < 0 signal. If the wait is cut short, none of them stays behind."""
    statuses: list[int] = []
    try:
        for pid in pids:
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    except BaseException:
        for pid in pids[len(statuses) :]:
            os.kill(pid, signal.SIGKILL)
        raise
    return statuses


def become_rank(rank: int, world_size: int, environment: dict[str, str]) -> None:
    """Give this (forked) process the environment that torchrun would give it."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | environment
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}


@dataclass
class Attempt:
    """What an ended attempt left behind."""

    run_dir: RunDir
    attempt: AttemptDir
    statuses: list[int]
    """By rank: >= 0 exit code, < 0 signal."""

    @property
    def outcomes(self) -> list[Outcome | None]:
        return [Outcome.load(self.attempt.outcome(rank)) for rank in range(len(self.statuses))]

    def outcome(self, rank: int = 0) -> Outcome:
        found = self.outcomes[rank]
        assert found is not None, self.log(rank)
        return found

    def log(self, rank: int = 0) -> str:
        return self.attempt.rank_log(rank).read_text(encoding="utf-8")

    def checkpoint(self) -> checkpoint.Loaded:
        newest = checkpoint.newest_valid(self.run_dir.checkpoints, print)
        assert newest is not None, self.log()
        return checkpoint.load(newest)

    def checkpoints(self) -> list[str]:
        """Everything that lies in the folder of the checkpoints."""
        return sorted(path.name for path in self.run_dir.checkpoints.iterdir())

    def weights(self) -> dict[str, Tensor]:
        return self.checkpoint().shared["model"]

    def export(self) -> dict[str, Tensor]:
        return load_file(self.run_dir.weights)

    def lines(self) -> list[dict[str, float]]:
        """metrics.jsonl, without the measured speeds."""
        lines = [json.loads(line) for line in self.run_dir.metrics.read_text(encoding="utf-8").splitlines()]
        return [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]

    def metric(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric, from metrics.jsonl."""
        return [(int(line["step"]), line[name]) for line in self.lines() if name in line]

    def events(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric, as TensorBoard reads it."""
        reader = EventAccumulator(str(self.run_dir.path))
        reader.Reload()
        return [(event.step, event.value) for event in reader.Scalars(name)]

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run_dir.result.read_text(encoding="utf-8"))
        return found


def start(
    run: Path,
    config: RunConfig,
    world_size: int = 1,
    environment: dict[str, str] | None = None,
    stop_request: str | None = None,
    **plan: Any,
) -> tuple[AttemptDir, list[int]]:
    """Fork the ranks of the next attempt of `run`, `environment` added to theirs. Returns their process ids too."""
    run_dir = RunDir(run)
    number = len(list((run / "attempts").glob("*"))) + 1 if run.exists() else 1
    attempt = run_dir.attempt(f"{number:03d}")
    attempt.logs.mkdir(parents=True)
    if stop_request is not None:
        attempt.stop_request.write_text(json.dumps({"signal": stop_request}), encoding="utf-8")
    store = str(attempt.path / "store") if world_size > 1 else None
    fields: dict[str, Any] = {"mode": "train", "launcher": "torchrun", "device": "cpu", "threads_per_rank": 1} | plan
    WorkerPlan(config=config, world_size=world_size, local_world_size=world_size, store=store, **fields).save(
        attempt.plan
    )

    def body(rank: int) -> int:
        become_rank(rank, world_size, environment or {})
        return main(attempt)

    return attempt, [fork(lambda rank=rank: body(rank)) for rank in range(world_size)]


def run(
    run_path: Path, config: RunConfig, world_size: int = 1, environment: dict[str, str] | None = None, **plan: Any
) -> Attempt:
    """Run one attempt to its end."""
    attempt, pids = start(run_path, config, world_size, environment, **plan)
    return Attempt(RunDir(run_path), attempt, exit_statuses(pids))


def finished(
    run_path: Path, config: RunConfig, world_size: int = 1, environment: dict[str, str] | None = None, **plan: Any
) -> Attempt:
    """Run one attempt that must succeed on every rank."""
    attempt = run(run_path, config, world_size, environment, **plan)
    logs = "".join(attempt.log(rank)[-3000:] for rank in range(world_size))
    assert attempt.statuses == [0] * world_size, logs
    return attempt


_numbers = itertools.count()


def in_ranks(
    folder: Path, world_size: int, function: Callable[[RunContext], T], config: RunConfig | None = None
) -> list[T]:
    """`function` in each of `world_size` forked ranks, without a run around it. Returns the results by rank."""
    here = folder / f"ranks-{next(_numbers)}"
    here.mkdir()
    store = str(here / "store") if world_size > 1 else None
    plan = WorkerPlan("train", config or tiny_config(), "torchrun", "cpu", world_size, world_size, 1, store=store)

    def body(rank: int) -> int:
        become_rank(rank, world_size, {})
        context = RunContext(plan)
        (here / f"{rank}.pickle").write_bytes(pickle.dumps(function(context)))
        context.close()
        return 0

    statuses = exit_statuses([fork(lambda rank=rank: body(rank)) for rank in range(world_size)])
    assert statuses == [0] * world_size, f"exit statuses {statuses}"
    return [pickle.loads((here / f"{rank}.pickle").read_bytes()) for rank in range(world_size)]


def wait_for(condition: Any, what: str, timeout_s: float = 60.0) -> None:
    """Poll for an event that another process brings about; the limit is only there to fail instead of hanging."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.005)
