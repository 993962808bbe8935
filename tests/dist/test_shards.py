"""Virtual shards: equal bits on 1, 2 and 4 processes, and after a resume from one number to another."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import RunConfig
from tests import splitmix
from tests.dist import toys
from tests.dist.harness import Attempt, finished, run, tiny_config

SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
CASES: dict[str, dict[str, Any]] = {
    "mlp": {},
    "batchnorm": {"model": {"name": "tests.dist.toys:WithBatchNorm"}, "ema__half_life_samples": 40.0},
    "dropout": {"model": {"name": "tests.dist.toys:WithDropout"}},
    "adamw, clipped": {"optim": {"name": "adamw", "lr": 0.01, "max_grad_norm": 0.5, "weight_decay": 0.1}},
    "not fused": {"optim": SGD | {"fused": False}},
    "bf16": {"mixed_precision": "bf16", "model": {"name": "tests.dist.toys:WithBatchNorm"}},
    "fp16": {"mixed_precision": "fp16", "optim": SGD, "model": {"name": "tests.dist.toys:WithBatchNorm"}},
    "accumulation": {"max_per_device_batch_size": 2, "model": {"name": "tests.dist.toys:WithBatchNorm"}},
    "skip": {
        "nonfinite": "skip",
        "model": {"name": "tests.dist.toys:WithBatchNorm"},
        "faults": [{"kind": "nan", "step": 2}],
    },
    "channels last": {"channels_last": True, "model": {"name": "tests.dist.toys:TwoConvolutions"}},
}
RAGGED = {"TRAIN_SIZE": "26"}
"""The last batch of an epoch has two samples: two of its four shards, and two of four ranks, have none."""


def config_of(case: str, **changes: Any) -> RunConfig:
    return tiny_config(**{"global_batch_size": 8, "virtual_shards": 4} | CASES[case] | changes)


def assert_same_bits(one: Attempt, other: Attempt) -> None:
    left, right = one.checkpoint(), other.checkpoint()
    assert left.name == right.name
    for stem, tensors in left.shared.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, right.shared[stem][name]), (stem, name)
    for own in right.ranks[1:]:
        assert all(torch.equal(tensor, right.ranks[0][name]) for name, tensor in own.items() if name != "window")
    assert all(torch.equal(tensor, right.ranks[0][name]) for name, tensor in left.ranks[0].items())
    assert left.state["train_state"] == right.state["train_state"]
    assert one.lines() == other.lines()
    assert all(torch.equal(tensor, other.export()[name]) for name, tensor in one.export().items())


@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_the_number_of_processes(tmp_path: Path, case: str) -> None:
    config = config_of(case)
    alone = finished(tmp_path / "1", config, 1, RAGGED)
    assert alone.checkpoint().state["train_state"]["step"] >= 6
    for world_size in (2, 4):
        assert_same_bits(alone, finished(tmp_path / str(world_size), config, world_size, RAGGED))


def test_eight_processes(tmp_path: Path) -> None:
    config = config_of("batchnorm", virtual_shards=8, global_batch_size=16)
    assert_same_bits(finished(tmp_path / "1", config, 1), finished(tmp_path / "8", config, 8))


def test_another_number_of_shards_is_another_run(tmp_path: Path) -> None:
    """So that equal bits are no accident of a network too small to tell."""
    two, four = (finished(tmp_path / str(n), config_of("batchnorm", virtual_shards=n)) for n in (2, 4))
    assert not all(torch.equal(tensor, four.weights()[name]) for name, tensor in two.weights().items())


def test_norms_and_losses_are_those_of_the_ordinary_step(tmp_path: Path) -> None:
    """In float64, where only rounding is left to differ."""
    double: dict[str, Any] = {"dtype": "float64", "log__every_steps": 1}
    plain = finished(tmp_path / "plain", tiny_config(global_batch_size=8, **double), 1, RAGGED)
    sharded = finished(tmp_path / "sharded", config_of("mlp", **double), 2, RAGGED)
    for name in ("train/loss", "optim/grad_norm", "eval/loss"):
        assert sharded.metric(name) == [(step, pytest.approx(value, rel=1e-12)) for step, value in plain.metric(name)]


def test_running_statistics_take_in_the_shards_in_their_order(tmp_path: Path) -> None:
    """One step by hand: momentum 0.1, the unbiased variance of each shard of two samples in turn."""
    config = config_of("batchnorm", max_epochs=1, ema__half_life_samples=None)
    attempt = finished(tmp_path, config, 2, {"TRAIN_SIZE": "8"})
    torch.manual_seed(config.seed)
    model = toys.WithBatchNorm(4)
    images = toys.Images(8, 1).images[torch.tensor(splitmix.permutation(8, 0, 0))].float() / 255
    mean, var = torch.zeros(4), torch.ones(4)
    for shard in images.split(2):
        seen = model.features[0](shard).detach()
        mean = 0.9 * mean + 0.1 * seen.mean((0, 2, 3))
        var = 0.9 * var + 0.1 * seen.transpose(0, 1).flatten(1).var(1)
    own = attempt.checkpoint().ranks[0]
    torch.testing.assert_close(own["buffer/features.1.running_mean"], mean)
    torch.testing.assert_close(own["buffer/features.1.running_var"], var)
    assert int(own["buffer/features.1.num_batches_tracked"]) == 4


@pytest.mark.parametrize("case", ["batchnorm", "dropout", "adamw, clipped", "fp16"])
def test_a_killed_run_goes_on_elsewhere_with_the_same_bits(tmp_path: Path, case: str) -> None:
    whole = finished(tmp_path / "whole", config_of(case), 1, RAGGED)
    kills = [{"kind": "sigkill", "step": 3, "attempt": 1}, {"kind": "sigkill", "step": 5, "attempt": 2}]
    config = config_of(case, checkpoint__every_steps=1, faults=kills)
    for world_size in (4, 1):
        assert -9 in run(tmp_path / "cut", config, world_size, RAGGED).statuses
    cut = finished(tmp_path / "cut", config, 2, RAGGED)
    assert_same_bits(whole, cut)
    assert "not the same bits" not in cut.log()
