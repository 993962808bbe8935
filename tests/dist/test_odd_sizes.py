"""One sample, one class, more batch than data, fewer samples than ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.harness import finished, tiny_config


@pytest.mark.parametrize(
    ("size", "batch", "world_size", "steps"),
    [
        (1, 1, 1, 1),
        (1, 3, 3, 1),  # two ranks never have a sample
        (2, 3, 3, 1),
        (10, 3, 3, 4),  # 3, 3, 3, 1
        (11, 3, 3, 4),  # 3, 3, 3, 2
        (5, 100, 2, 1),
        (7, 2, 2, 4),
    ],
)
def test_same_weights_as_alone(tmp_path: Path, size: int, batch: int, world_size: int, steps: int) -> None:
    config = tiny_config(dtype="float64", global_batch_size=batch)
    environment = {"TRAIN_SIZE": str(size), "EVAL_SIZE": "1"}
    alone = finished(tmp_path / "alone", config, 1, environment)
    together = finished(tmp_path / "together", config, world_size, environment)
    assert together.outcome().step == 2 * steps
    assert together.checkpoint().state["train_state"]["samples_seen"] == 2 * size
    for name, tensor in alone.weights().items():
        torch.testing.assert_close(together.weights()[name], tensor, rtol=0, atol=1e-12)
    assert together.metric("train/loss") == [
        (step, pytest.approx(value, abs=1e-12)) for step, value in alone.metric("train/loss")
    ]


@pytest.mark.parametrize(
    ("size", "batch", "world_size", "steps"),
    [
        (1, 4, 4, 1),  # three ranks never have a sample
        (2, 4, 4, 1),
        (10, 4, 4, 3),  # 4, 4, 2
        (11, 4, 2, 3),  # 4, 4, 3
        (5, 100, 2, 1),
    ],
)
def test_same_bits_as_alone(tmp_path: Path, size: int, batch: int, world_size: int, steps: int) -> None:
    config = tiny_config(virtual_shards=4, global_batch_size=batch)
    environment = {"TRAIN_SIZE": str(size), "EVAL_SIZE": "1"}
    alone = finished(tmp_path / "alone", config, 1, environment)
    together = finished(tmp_path / "together", config, world_size, environment)
    assert together.outcome().step == 2 * steps
    assert together.checkpoint().state["train_state"]["samples_seen"] == 2 * size
    assert all(torch.equal(tensor, together.weights()[name]) for name, tensor in alone.weights().items())
    assert together.lines() == alone.lines()


def test_rank_without_samples_leaves_its_statistics_alone(tmp_path: Path) -> None:
    config = tiny_config(model={"name": "tests.dist.toys:WithBatchNorm"}, global_batch_size=3, max_epochs=1)
    attempt = finished(tmp_path, config, 3, {"TRAIN_SIZE": "10"})
    # The last batch is one sample, which is that of rank 2.
    counts = [int(own["buffer/features.1.num_batches_tracked"]) for own in attempt.checkpoint().ranks]
    assert counts == [3, 3, 4]


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_class(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(data={"name": "tests.dist.toys:one_class", "residency": "device"}, max_epochs=1)
    attempt = finished(tmp_path, config, world_size)
    right = {"eval/loss": 0.0, "eval/top1": 1.0, "eval/balanced_accuracy": 1.0, "eval/ece": 0.0, "train/loss": 0.0}
    assert attempt.result()["metrics"] == right


@pytest.mark.parametrize("world_size", [1, 3])
def test_drop_last(tmp_path: Path, world_size: int) -> None:
    attempt = finished(tmp_path, tiny_config(drop_last=True), world_size, {"TRAIN_SIZE": "23"})
    state = attempt.checkpoint().state["train_state"]
    assert (state["step"], state["samples_seen"], state["epoch"]) == (4, 32, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_draw_on_into_further_epochs(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(max_epochs=None, max_steps=11, global_batch_size=5)
    attempt = finished(tmp_path, config, world_size, {"TRAIN_SIZE": "12"})
    state = attempt.checkpoint().state["train_state"]
    assert (state["step"], state["epoch"], state["batch_in_epoch"], state["samples_seen"]) == (11, 3, 2, 3 * 12 + 10)


def test_per_device_batch_size_is_per_rank(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"global_batch_size": None, "per_device_batch_size": 4}
    attempt = finished(tmp_path, tiny_config(**changes), 2)
    assert attempt.checkpoint().state["global_batch_size"] == 8
    assert "per-device 4 x 2 processes x accumulation 1 = global 8" in attempt.log()
