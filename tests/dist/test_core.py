"""First checks of the whole worker."""

from pathlib import Path

import pytest
import torch

from tests.dist.harness import finished, run, tiny_config


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_same_weights_on_any_world_size(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(dtype="float64", max_epochs=3)
    alone = finished(tmp_path / "alone", config).weights()
    together = finished(tmp_path / "together", config, world_size).weights()
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", ["WithDropout", "WithBatchNorm"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_resume_is_bit_identical(tmp_path: Path, world_size: int, model: str) -> None:
    changes = {"model": {"name": f"tests.dist.toys:{model}"}, "checkpoint__every_steps": 3, "optim": {"name": "adamw", "lr": 0.01}}
    whole = finished(tmp_path / "whole", tiny_config(**changes), world_size)
    killed = run(tmp_path / "cut", tiny_config(**changes), world_size, {"DIE_AT": "7", "DIE_RANK": str(world_size - 1)})
    assert killed.statuses[world_size - 1] == -9
    resumed = finished(tmp_path / "cut", tiny_config(**changes), world_size)
    assert resumed.checkpoint().state["train_state"] == whole.checkpoint().state["train_state"]
    for key, tensor in whole.export().items():
        assert torch.equal(tensor, resumed.export()[key]), key
