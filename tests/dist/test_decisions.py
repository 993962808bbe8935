"""Stopping by decision, at one step on all ranks: early stopping, the end of the time, a file in the run folder."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.harness import Attempt, finished, run, tiny_config


def equal(one: Attempt, other: Attempt) -> bool:
    return all(torch.equal(tensor, other.export()[name]) for name, tensor in one.export().items())


def stopped(attempt: Attempt, by: str) -> int:
    """Check that all ranks stopped alike, one of them knowing why; returns the step."""
    assert attempt.statuses == [0] * len(attempt.statuses)
    outcomes = [attempt.outcome(rank) for rank in range(len(attempt.statuses))]
    assert {outcome.status for outcome in outcomes} == {"stopped"}
    assert by in {outcome.signal for outcome in outcomes}
    (step,) = {outcome.step for outcome in outcomes}
    assert step is not None
    return step


@pytest.mark.parametrize("world_size", [1, 3])
def test_time_is_over(tmp_path: Path, world_size: int) -> None:
    whole = finished(tmp_path / "whole", tiny_config(), world_size)
    timed = tiny_config(max_time_s=50.0)
    assert stopped(run(tmp_path / "cut", timed, world_size, started=time.time() - 100), "max_time_s") == 1
    assert equal(finished(tmp_path / "cut", timed, world_size, started=time.time()), whole)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_stop_file_stops_once(tmp_path: Path, world_size: int) -> None:
    whole = finished(tmp_path / "whole", tiny_config(), world_size)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "stop").touch()
    assert stopped(run(tmp_path / "cut", tiny_config(), world_size), "the stop file") == 1
    assert not (tmp_path / "cut" / "stop").exists()
    assert equal(finished(tmp_path / "cut", tiny_config(), world_size), whole)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("metric", ["eval/top1", "eval/loss"])
def test_early_stopping_ends_all_ranks_at_one_step(tmp_path: Path, world_size: int, metric: str) -> None:
    changes: dict[str, Any] = {"max_epochs": 9, "optim": {"name": "sgd", "lr": 0.0}, "log__every_steps": 5}
    early = {"patience": 2, "metric": metric}
    attempt = finished(tmp_path, tiny_config(**changes, early_stopping=early), world_size)
    outcomes = {(outcome.status, outcome.step, outcome.epoch) for outcome in attempt.outcomes if outcome}
    # The first evaluation is the best, the second and third are no better.
    assert outcomes == {("done", 24, 3)}
    assert f"stops early at step 24: {metric} was no better than" in attempt.log()
    assert "in 2 evaluations (early_stopping.patience)" in attempt.log()
    assert attempt.result()["status"] == "finished"
    assert attempt.checkpoint().state["train_state"]["step"] == 24
    assert attempt.metric("train/loss")[-1][0] == 24
    # Without the rule it goes on where it ended.
    longer = finished(tmp_path, tiny_config(**changes), world_size)
    assert longer.outcome().step == 72


def test_a_better_evaluation_starts_the_count_anew(tmp_path: Path) -> None:
    config = tiny_config(max_epochs=6, early_stopping={"patience": 2, "metric": "eval/loss"}, optim__lr=0.05)
    attempt = finished(tmp_path, config)
    losses = [value for _, value in attempt.metric("eval/loss")]
    assert losses == sorted(losses, reverse=True)
    assert attempt.outcome().epoch == 6


def test_better_by_too_little_is_not_better(tmp_path: Path) -> None:
    early = {"patience": 2, "metric": "eval/loss", "min_delta": 10.0}
    attempt = finished(tmp_path, tiny_config(max_epochs=6, early_stopping=early, optim__lr=0.05))
    assert attempt.outcome().epoch == 3


def test_the_count_is_kept_across_a_resume(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_epochs": 9, "optim": {"name": "sgd", "lr": 0.0}, "early_stopping": {"patience": 3}}
    assert run(tmp_path, tiny_config(**changes, faults=[{"kind": "sigkill", "step": 20}])).statuses == [-9]
    assert finished(tmp_path, tiny_config(**changes)).outcome().step == 32
