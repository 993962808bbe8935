"""Losses, gradients and spikes that must not reach the weights: stop, skip, rollback, read at once or a step later."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import splitmix
from tests.dist.harness import Attempt, finished, run, tiny_config
from trainer import agreement

BAD_STEP = 5
NET = {"name": "tests.dist.toys:WithBatchNorm"}
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}


@pytest.fixture(params=["at once", "a step later"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The order of things on the CPU and, tried there, that on a GPU: between log points no outcome is read at once."""
    if request.param == "a step later":
        monkeypatch.setattr(agreement, "DEFERRED", ["cuda", "cpu"])
    return str(request.param)


RARELY: dict[str, Any] = {"log__every_steps": 4}


def nan_at(*steps: int, rank: int = 0) -> list[dict[str, Any]]:
    return [{"kind": "nan", "rank": rank, "step": step} for step in steps]


def bad_batches(attempt: Attempt) -> list[dict[str, Any]]:
    return [json.loads(line) for line in attempt.run_dir.bad_batches.read_text(encoding="utf-8").splitlines()]


def ids_of(batch: int, batch_size: int = 8, size: int = 64) -> list[int]:
    epoch, index = divmod(batch, size // batch_size)
    return splitmix.permutation(size, 0, epoch)[index * batch_size : (index + 1) * batch_size]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("world_size", [1, 2])
def test_stop_comes_before_the_update_lands(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(**RARELY, model=NET, checkpoint__every_steps=5, faults=nan_at(BAD_STEP, rank=world_size - 1))
    attempt = run(tmp_path, config, world_size)
    assert attempt.statuses == [1] * world_size
    message = attempt.outcome().message or ""
    assert f"the loss is not finite at step {BAD_STEP} on rank {world_size - 1}" in message
    assert "first parameter that is not finite" not in message
    assert attempt.checkpoint().state["train_state"]["step"] == BAD_STEP


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("fused", [True, False])
def test_skip_leaves_the_batch_out_on_all_ranks(tmp_path: Path, world_size: int, fused: bool) -> None:
    config = tiny_config(
        model=NET,
        nonfinite="skip",
        ema__half_life_samples=40.0,
        optim=SGD | {"fused": fused},
        faults=nan_at(BAD_STEP, rank=world_size - 1),
    )
    attempt = finished(tmp_path, config, world_size)
    state = attempt.checkpoint().state["train_state"]
    assert (state["batch"], state["step"], state["skipped"], state["dropped"]) == (16, 15, 1, 1)
    tensors = [*attempt.weights().values(), *attempt.export().values()]
    tensors += [tensor for own in attempt.checkpoint().ranks for tensor in own.values()]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    assert all(value == value for line in attempt.lines() for value in line.values())
    (line,) = bad_batches(attempt)
    assert (line["what"], line["batch"], line["sample_ids"]) == ("dropped", BAD_STEP, ids_of(BAD_STEP))
    assert f"dropped the update on batch {BAD_STEP} at step {BAD_STEP}: the loss is not finite on rank" in attempt.log()
    assert {value for step, value in attempt.metric("guard/dropped") if step > BAD_STEP} == {1.0}


@pytest.mark.usefixtures("reading")
def test_skip_restores_what_the_forward_pass_changed(tmp_path: Path) -> None:
    """Only one step, and that is bad: everything is as it was built."""
    shared: dict[str, Any] = {"model": NET, "nonfinite": "skip", "max_epochs": 1, "optim": SGD}
    bad = finished(tmp_path / "bad", tiny_config(**shared, faults=nan_at(0)), 1, {"TRAIN_SIZE": "8"})
    own = bad.checkpoint().ranks[0]
    assert torch.equal(own["buffer/features.1.running_mean"], torch.zeros_like(own["buffer/features.1.running_mean"]))
    assert int(own["buffer/features.1.num_batches_tracked"]) == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_skip_goes_by_the_gradient_too(tmp_path: Path, world_size: int) -> None:
    model = {"name": "tests.dist.toys:BadGradient", "args": {"rank": world_size - 1, "step": BAD_STEP}}
    attempt = finished(tmp_path, tiny_config(model=model, nonfinite="skip"), world_size)
    (line,) = bad_batches(attempt)
    assert (line["reason"], line["batch"]) == ("the gradient is not finite", BAD_STEP)
    assert all(bool(tensor.isfinite().all()) for tensor in attempt.weights().values())


def test_the_budget_is_kept_across_a_resume(tmp_path: Path) -> None:
    guard = {"max_skipped": 2, "max_skipped_fraction": 1.0}
    faults = [*nan_at(2, 3), {"kind": "sigkill", "step": 6}, {"kind": "nan", "step": 9, "attempt": 2}]
    config = tiny_config(nonfinite="skip", guard=guard, checkpoint__every_steps=1, faults=faults)
    assert run(tmp_path, config).statuses == [-9]
    second = run(tmp_path, config)
    assert second.statuses == [1]
    said = "3 of 12 updates were dropped, more than allowed (guard.max_skipped 2, guard.max_skipped_fraction 1)"
    assert said in (second.outcome().message or "")
    assert [line["batch"] for line in bad_batches(second)] == [2, 4]


def test_the_share_of_dropped_updates_is_limited(tmp_path: Path) -> None:
    attempt = run(tmp_path, tiny_config(nonfinite="skip", faults=nan_at(3, 3), guard__max_skipped_fraction=0.1))
    # One always may be; two of five are more than a tenth.
    assert "2 of 5 updates were dropped" in (attempt.outcome().message or "")


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("world_size", [1, 2])
def test_rollback_goes_back_and_past_the_batch(tmp_path: Path, world_size: int) -> None:
    """As if the batch had been passed over in the first place, in weights and metrics, whoever saw the bad loss."""
    shared = RARELY | {"model": {"name": "tests.dist.toys:WithDropout"}, "checkpoint__every_steps": 3}
    faults = nan_at(BAD_STEP, rank=world_size - 1)
    attempt = finished(tmp_path / "a", tiny_config(**shared, nonfinite="rollback", faults=faults), world_size)
    state = attempt.checkpoint().state["train_state"]
    assert (state["batch"], state["step"], state["rollbacks"], state["passed_over"]) == (16, 15, 1, [BAD_STEP])
    said = (
        f"rollback 1 of 3: the loss is not finite on rank {world_size - 1} on batch 5 at step 5; back to step_00000003"
    )
    assert said in attempt.log()
    (line,) = bad_batches(attempt)
    assert (line["what"], line["sample_ids"]) == ("passed over", ids_of(BAD_STEP))
    assert [step for step, _ in attempt.metric("train/loss")] == [4, 8, 12, 15]
    skipped = finished(tmp_path / "b", tiny_config(**shared, nonfinite="skip", faults=faults), world_size)
    assert equal(attempt.weights(), skipped.weights())


def test_rollback_before_the_first_checkpoint_goes_back_to_the_start(tmp_path: Path) -> None:
    attempt = finished(tmp_path, tiny_config(nonfinite="rollback", faults=nan_at(1)), 2)
    assert "back to step_00000000" in attempt.log()
    assert attempt.checkpoint().state["train_state"]["step"] == 15


def test_rollbacks_are_limited(tmp_path: Path) -> None:
    faults = nan_at(1, 1, 2)
    config = tiny_config(nonfinite="rollback", faults=faults, guard__max_rollbacks=2, checkpoint__every_steps=1)
    attempt = run(tmp_path, config, 2)
    assert attempt.statuses == [1, 1]
    assert "at step 2, after 2 rollbacks (guard.max_rollbacks)" in (attempt.outcome().message or "")


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_a_spike_counts_as_bad(tmp_path: Path, world_size: int, policy: str) -> None:
    model = {"name": "tests.dist.toys:Spikes", "args": {"rank": world_size - 1, "step": 12}}
    guard = {"spike_factor": 20.0, "spike_window_steps": 10}
    config = tiny_config(**RARELY, model=model, nonfinite=policy, guard=guard, optim={"name": "sgd", "lr": 0.01})
    attempt = run(tmp_path, config, world_size)
    state = attempt.checkpoint().state["train_state"]
    if policy == "stop":
        assert attempt.statuses == [1] * world_size
        assert "stopped at step 12: its loss, " in (attempt.outcome().message or "")
        return
    assert attempt.statuses == [0] * world_size
    assert (state["batch"], state["step"]) == (16, 15)
    (line,) = bad_batches(attempt)
    assert line["batch"] == 12
    assert "times the median" in line["reason"]


def test_nothing_is_a_spike_before_the_window_is_full(tmp_path: Path) -> None:
    model = {"name": "tests.dist.toys:Spikes", "args": {"step": 9}}
    guard = {"spike_factor": 20.0, "spike_window_steps": 10}
    attempt = finished(tmp_path, tiny_config(model=model, guard=guard, optim={"name": "sgd", "lr": 1e-9}))
    assert attempt.checkpoint().state["train_state"]["step"] == 16


def test_a_resume_judges_spikes_by_the_same_window(tmp_path: Path) -> None:
    guard = {"spike_factor": 20.0, "spike_window_steps": 10}
    config = tiny_config(
        guard=guard,
        checkpoint__every_steps=4,
        faults=[{"kind": "sigkill", "step": 9}],
        optim={"name": "sgd", "lr": 0.01},
    )
    assert run(tmp_path / "cut", config).statuses == [-9]
    cut = finished(tmp_path / "cut", config)
    whole = finished(tmp_path / "whole", tiny_config(guard=guard, optim={"name": "sgd", "lr": 0.01}))
    assert cut.checkpoint().state["train_state"] == whole.checkpoint().state["train_state"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_fp16_overflow_is_no_bad_batch(tmp_path: Path, world_size: int) -> None:
    """The scaler finds its scale by overflows: they are skipped as ever, and cost nothing of the budget."""
    config = tiny_config(
        nonfinite="skip", mixed_precision="fp16", guard__max_skipped=1, optim={"name": "sgd", "lr": 0.05}
    )
    attempt = finished(tmp_path, config, world_size)
    assert attempt.checkpoint().state["train_state"]["dropped"] == 0


@pytest.mark.parametrize("shards", [0, 2])
def test_losses_are_told_without_the_scale_of_fp16(tmp_path: Path, shards: int) -> None:
    changes: dict[str, Any] = {"mixed_precision": "fp16", "guard__spike_factor": 100.0, "virtual_shards": shards}
    losses = []
    for world_size in (1, 2):
        attempt = finished(tmp_path / str(world_size), tiny_config(**changes, optim=SGD), world_size)
        losses.append(attempt.checkpoint().state["train_state"]["recent_losses"])
    assert losses[0] == (losses[1] if shards else pytest.approx(losses[1], rel=0.01))
    assert max(losses[0]) < 10


def test_a_rollback_counts_no_time_twice(tmp_path: Path) -> None:
    began = time.time()
    config = tiny_config(nonfinite="rollback", faults=nan_at(6, 9, 12), checkpoint__every_steps=2)
    attempt = finished(tmp_path, config)
    assert attempt.checkpoint().state["train_state"]["rollbacks"] == 3
    assert attempt.result()["time"]["total_s"] <= time.time() - began + 0.1


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_bad_gradient_stops_before_it_lands(tmp_path: Path, world_size: int, dtype: str) -> None:
    model = {"name": "tests.dist.toys:BadGradient", "args": {"rank": world_size - 1, "step": BAD_STEP}}
    attempt = run(tmp_path, tiny_config(model=model, dtype=dtype), world_size)
    assert attempt.statuses == [1] * world_size
    assert f"stopped at step {BAD_STEP}: the gradient is not finite" in (attempt.outcome().message or "")


def test_each_step_has_one_point_whatever_is_skipped_and_killed(tmp_path: Path) -> None:
    """The last batch of an epoch, and of the run, makes no update: the step is that of the batch before."""
    faults = [{"kind": "nan", "step": 7, "attempt": None}, {"kind": "sigkill", "step": 7}, {"kind": "nan", "step": 14}]
    config = tiny_config(
        nonfinite="skip", guard__max_skipped_fraction=1.0, checkpoint__every_steps=7, checkpoint__every_epochs=None,
        log__every_steps=7, model={"name": "tests.dist.toys:Mortal"}, faults=faults,
    )  # fmt: skip
    assert run(tmp_path, config).statuses == [-9]
    attempt = finished(tmp_path, config)
    for name in ("train/loss", "eval/loss"):
        steps = [step for step, _ in attempt.metric(name)]
        assert sorted(set(steps)) == steps, name


def test_what_a_resume_trains_on_after_all_is_no_bad_batch(tmp_path: Path) -> None:
    faults = [*nan_at(2, 5), {"kind": "sigkill", "step": 5}]
    config = tiny_config(
        nonfinite="skip",
        guard__max_skipped_fraction=1.0,
        checkpoint={"every_steps": 4, "every_epochs": None},
        faults=faults,
    )
    assert run(tmp_path, config).statuses == [-9]
    # The nan at step 5 came after the checkpoint of step 4, and does not come again.
    attempt = finished(tmp_path, config)
    assert attempt.checkpoint().state["train_state"]["dropped"] == 1
    assert [line["batch"] for line in bad_batches(attempt)] == [2]
