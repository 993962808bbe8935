"""Virtual shards: equal bits on 1, 2 and 4 processes, and after a resume from one number to another."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import RunConfig
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
