"""The order of things on a GPU, where an update's outcome is read one step later, tried on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.harness import Attempt, finished, run, tiny_config
from trainer import agreement

FP16 = {"mixed_precision": "fp16", "optim": {"name": "sgd", "lr": 0.05, "momentum": 0.9}}


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(agreement, "DEFERRED", ["cuda", "cpu"])
    return monkeypatch


def same(one: Attempt, other: Attempt) -> bool:
    tensors = all(torch.equal(tensor, other.export()[name]) for name, tensor in one.export().items())
    return tensors and one.checkpoint().state["train_state"] == other.checkpoint().state["train_state"]


@pytest.mark.parametrize("changes", [{}, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_same_run_whenever_outcomes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], world_size: int
) -> None:
    model = {"name": "tests.dist.toys:WithBatchNorm"}
    config = tiny_config(log__every_steps=5, ema__half_life_samples=40.0, model=model, **changes)
    at_once = finished(tmp_path / "at_once", config, world_size)
    monkeypatch.setattr(agreement, "DEFERRED", ["cuda", "cpu"])
    assert same(at_once, finished(tmp_path / "deferred", config, world_size))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.usefixtures("deferred")
def test_a_stop_is_agreed_one_step_later_and_loses_nothing(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(log__every_steps=100, model={"name": "tests.dist.toys:WithDropout"})
    whole = finished(tmp_path / "whole", config, world_size)
    stopped = run(tmp_path / "cut", config, world_size, {"STOP_AT": "3", "STOP_RANK": str(world_size - 1)})
    assert stopped.statuses == [0] * world_size
    ended = {(outcome.status, outcome.step) for outcome in stopped.outcomes if outcome}
    assert len(ended) == 1
    assert ended <= {("stopped", 4), ("stopped", 5)}
    assert same(whole, finished(tmp_path / "cut", config, world_size))


@pytest.mark.usefixtures("deferred")
def test_a_bad_loss_stops_all_ranks_and_is_not_saved(tmp_path: Path) -> None:
    model = {"name": "tests.dist.toys:NotFinite", "args": {"rank": 1, "step": 5}}
    attempt = run(tmp_path, tiny_config(log__every_steps=100, checkpoint__every_steps=2, model=model), 2)
    assert attempt.statuses == [1, 1]
    assert "not finite at step 5 on rank 1" in (attempt.outcome().message or "")
    assert all(bool(tensor.isfinite().all()) for tensor in attempt.weights().values())
