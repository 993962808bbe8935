"""A backbone from a file, partly frozen and computed twice: the same bits on 1 and 2 processes and after a resume."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torchvision.models import resnet18

from configs.schema import RunConfig
from tests.dist.harness import finished, run, tiny_config
from tests.dist.test_shards import assert_same_bits


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of another run, for three channels and 1000 classes."""
    torch.manual_seed(5)
    state = resnet18().state_dict()
    save_file(state, folder / "backbone.safetensors")
    return state


def config(folder: Path, **more: Any) -> RunConfig:
    backbone = {"name": "resnet18", "weights": str(folder / "backbone.safetensors"), "checkpointing": True}
    frozen = {"freeze_except": ["fc", "layer4"]}
    return tiny_config(model=backbone | frozen, max_epochs=None, max_steps=4, eval__every_epochs=None, **more)


def test_what_is_frozen_stays_and_the_rest_learns(tmp_path: Path) -> None:
    state = weights(tmp_path)
    attempt = finished(tmp_path / "run", config(tmp_path), 2)
    trained = load_file(attempt.run_dir.weights)
    for name, tensor in trained.items():
        if name.startswith(("layer4.", "fc.")):
            assert not torch.equal(tensor, state[name][:4] if name.startswith("fc.") else state[name]), name
        elif name == "conv1.weight":
            torch.testing.assert_close(tensor, state[name].sum(1, keepdim=True))
        else:
            assert torch.equal(tensor, state[name]), name
    log = attempt.log()
    assert (
        f"weights    {tmp_path}/backbone.safetensors: 120 of 122 tensors; conv1.weight: 3 channels summed to 1;" in log
    )
    assert "new, from seed 0: fc.weight, fc.bias (4 classes, it has 1,000)" in log
    assert "memory     gradient checkpointing, 8 blocks: activations are computed again in the backward pass" in log
    assert "frozen     " in log


def test_the_same_bits_on_any_number_of_processes_and_after_a_resume(tmp_path: Path) -> None:
    weights(tmp_path)
    shards = config(tmp_path, virtual_shards=2, checkpoint__every_steps=2)
    alone, together = (finished(tmp_path / str(ranks), shards, ranks) for ranks in (1, 2))
    assert_same_bits(alone, together)
    halfway = config(tmp_path, virtual_shards=2, faults=[{"kind": "sigkill", "rank": 0, "step": 3}])
    run(tmp_path / "cut", halfway.model_copy(update={"checkpoint": shards.checkpoint}), 2)
    (tmp_path / "backbone.safetensors").unlink()  # a resume has no use for it
    assert_same_bits(finished(tmp_path / "cut", shards, 1), alone)
