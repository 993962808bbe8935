"""Several updates in one call against one at a time. It is compiled in one test only: the rest is the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.errors import EXIT_CONFIG, EXIT_ENVIRONMENT, ConfigError, EnvironmentProblem
from configs.schema import RunConfig
from tests.dist.harness import Attempt, finished, run, tiny_config

OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
    "sgd with everything": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "adam": {"name": "adam", "lr": 0.01, "weight_decay": 0.1},
    "adamw": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.95]},
    "clipped": {"name": "adamw", "lr": 0.01, "max_grad_norm": 0.05},
}


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_it_is(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return function

    monkeypatch.setattr(torch, "compile", as_it_is)


def config(count: int, **changes: Any) -> RunConfig:
    return tiny_config(steps_per_execution=count, **{"dtype": "float64", "log__every_steps": 4} | changes)


def assert_close(one: Attempt, other: Attempt) -> None:
    """Weights and optimizer state within the rounding of float64, and the same account of everything else."""
    for stem, tensors in one.checkpoint().shared.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(other.checkpoint().shared[stem][name], tensor, rtol=1e-11, atol=1e-12)
    left, right = (attempt.checkpoint().state["train_state"] for attempt in (one, other))
    for name in ("step", "batch", "epoch", "samples_seen"):
        assert left[name] == right[name], name
    for name in ("train/loss", "optim/grad_norm", "optim/lr", "eval/loss"):
        assert [step for step, _ in one.metric(name)] == [step for step, _ in other.metric(name)]
        values = [value for _, value in one.metric(name)]
        assert [value for _, value in other.metric(name)] == pytest.approx(values, rel=1e-11)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("size", ["64", "61"])
def test_the_updates_are_those_of_single_steps(tmp_path: Path, optim: str, size: str) -> None:
    one, three = (
        finished(tmp_path / str(count), config(count, optim=OPTIMIZERS[optim]), 1, {"TRAIN_SIZE": size})
        for count in (1, 3)
    )
    assert_close(one, three)


@pytest.mark.usefixtures("uncompiled")
def test_a_killed_run_goes_on_with_the_same_groups_and_bits(tmp_path: Path) -> None:
    kill = {"kind": "sigkill", "step": 11}
    whole = finished(tmp_path / "whole", config(3, dtype="float32", checkpoint__every_steps=5))
    cut = config(3, dtype="float32", checkpoint__every_steps=5, faults=[kill])
    assert run(tmp_path / "cut", cut).statuses == [-9]
    again = finished(tmp_path / "cut", cut)
    assert all(tensor.equal(again.weights()[name]) for name, tensor in whole.weights().items())
    assert again.metric("train/loss") == whole.metric("train/loss")


@pytest.mark.usefixtures("uncompiled")
def test_no_update_lands_from_a_bad_one_on(tmp_path: Path) -> None:
    nan = {"kind": "nan", "step": 5}
    failed = run(tmp_path / "bad", config(4, faults=[nan], log__every_steps=8, checkpoint__every_steps=8))
    outcome = failed.outcome()
    assert (outcome.status, outcome.step) == ("failed", 5)
    assert "the loss is not finite at step 5 on rank 0" in (outcome.message or "")
    assert "first parameter that is not finite" not in (outcome.message or "")


@pytest.mark.parametrize(
    ("world_size", "changes", "reason"),
    [
        (2, {}, "2 processes"),
        (1, {"max_per_device_batch_size": 4}, "accumulation (max_per_device_batch_size)"),
        (1, {"ema__half_life_samples": 40.0}, "ema"),
        (1, {"model": {"name": "tests.dist.toys:WithDropout"}}, "dropout, or other random numbers"),
        (1, {"model": {"name": "tests.dist.odd_nets:DropsByFunction"}}, "dropout, or other random numbers"),
        (1, {"model": {"name": "small_resnet"}}, "layers with buffers, such as BatchNorm"),
        (1, {"data__residency": "stream", "data__num_workers": 0}, "data that are not resident"),
        (1, {"nonfinite": "skip"}, "nonfinite: skip or rollback, or guard.spike_factor"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path: Path, world_size: int, changes: dict[str, Any], reason: str) -> None:
    failed = run(tmp_path / "run", config(2, dtype="float32", **changes), world_size)
    message = failed.outcome().message or ""
    assert message.startswith("steps_per_execution=2 does not go with ")
    assert reason in message


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({}, "after 4 updates (log.every_steps); use 4 or less"),
        ({"log__every_steps": 50}, "after 8 updates (full batches in an epoch); use 8 or less"),
        ({"log__every_steps": 50, "max_epochs": None, "max_steps": 3}, "after 3 updates (max_steps); use 3 or less"),
    ],
)
def test_groups_that_would_never_be_taken_are_refused(tmp_path: Path, changes: dict[str, Any], due: str) -> None:
    failed = run(tmp_path / "run", config(9, dtype="float32", **changes))
    message = failed.outcome().message or ""
    assert message == f"steps_per_execution=9 would never be: something is due {due}, or a longer interval"


@pytest.mark.usefixtures("uncompiled")
def test_out_of_memory_says_to_take_fewer(tmp_path: Path) -> None:
    """A restart with half the micro-batch would only be refused."""
    failed = run(tmp_path / "run", config(2, faults=[{"kind": "oom", "step": 2}])).outcome()
    assert (failed.kind, failed.exit_code) == (EnvironmentProblem.kind, EXIT_ENVIRONMENT)
    assert "with 2 updates in one call" in (failed.message or "")
    assert "use a smaller steps_per_execution or global_batch_size" in (failed.message or "")


def test_without_a_compiler_it_is_one_sentence(tmp_path: Path) -> None:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "PATH": "/nowhere", "CXX": "/nowhere/c++"}
    failed = run(tmp_path / "run", config(2, dtype="float32"), 1, environment).outcome()
    assert (failed.kind, failed.exit_code) == (ConfigError.kind, EXIT_CONFIG)
    assert (failed.message or "").startswith("torch.compile: InvalidCxxCompiler: No working C++ compiler")
    assert (failed.message or "").endswith("; use compile: false and steps_per_execution: 1")


@pytest.mark.usefixtures("uncompiled")
def test_channels_last_gives_the_same_updates(tmp_path: Path) -> None:
    changes = {"channels_last": True, "model": {"name": "tests.dist.toys:TwoConvolutions"}}
    assert_close(*(finished(tmp_path / str(count), config(count, **changes)) for count in (1, 3)))


@pytest.mark.usefixtures("uncompiled")
def test_bf16_is_that_of_single_steps(tmp_path: Path) -> None:
    """To a few of its 8 bits."""
    changes = {"dtype": "float32", "mixed_precision": "bf16", "optim": OPTIMIZERS["adamw"]}
    one, three = (finished(tmp_path / str(count), config(count, **changes)) for count in (1, 3))
    losses = [value for _, value in one.metric("train/loss")]
    assert [value for _, value in three.metric("train/loss")] == pytest.approx(losses, rel=0.01)


def test_compiled_it_learns_the_same(tmp_path: Path) -> None:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    one, two = (
        finished(tmp_path / str(count), config(count, dtype="float32", log__every_steps=2), 1, environment)
        for count in (1, 2)
    )
    losses = [value for _, value in one.metric("train/loss")]
    assert [value for _, value in two.metric("train/loss")] == pytest.approx(losses, rel=1e-4)
    assert two.metric("eval/top1") == one.metric("eval/top1")
