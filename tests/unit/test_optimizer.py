"""The updates themselves, against torch's own optimizer classes."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from configs.sections import OptimConfig
from trainer.optim import build_optimizer
from trainer.optimizer import Optimizer

CPU = torch.device("cpu")
CLASSES = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
CONFIGS: list[dict[str, Any]] = [
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.9},
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
    {"name": "adam", "betas": (0.8, 0.9), "eps": 1e-6},
    {"name": "adamw", "betas": (0.8, 0.9)},
]


def gradients(model: nn.Module) -> Iterator[None]:
    """Another gradient each time, the same for each call."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(6):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        yield


def build(config: dict[str, Any], *, fused: bool) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    return model, build_optimizer(
        model, OptimConfig(weight_decay=0.1, decay_norm_and_bias=True, fused=fused, **config), CPU
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_bits_are_those_of_torchs_own_class(config: dict[str, Any], fused: bool) -> None:
    model, ours = build(config, fused=fused)
    torch.manual_seed(0)
    other = nn.Linear(5, 3)
    arguments = {key: value for key, value in config.items() if key != "name"} | {"weight_decay": 0.1}
    theirs = CLASSES[config["name"]](other.parameters(), foreach=not fused, fused=fused, **arguments)
    for step, _ in enumerate(zip(gradients(model), gradients(other), strict=True)):
        ours.lr = theirs.param_groups[0]["lr"] = 0.1 / (step + 1)
        ours.step()
        theirs.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(other.named_parameters())[name])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_guarded_update_leaves_everything_as_it_was(config: dict[str, Any]) -> None:
    results = []
    for bad_first in (True, False):
        model, optimizer = build(config, fused=True)
        if bad_first:
            before = [parameter.detach().clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, torch.nan)
            optimizer.guard = torch.ones(())
            optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        for _ in gradients(model):
            optimizer.guard = torch.zeros(())
            optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_nothing_of_it_imports_dynamo() -> None:
    """A second and a half of each start; torch.optim's classes import it when the first one is made."""
    code = """
import sys, torch
from torch import nn
from configs.sections import OptimConfig
from trainer.optim import apply_update, build_optimizer
for name in ("sgd", "adam", "adamw"):
    for fused in (False, True):
        for scaler in (None, torch.amp.GradScaler("cpu")):
            model = nn.Linear(2, 2)
            optimizer = build_optimizer(model, OptimConfig(name=name, fused=fused), torch.device("cpu"))
            loss = model(torch.ones(1, 2)).sum()
            (loss if scaler is None else scaler.scale(loss)).backward()
            apply_update(optimizer, scaler, 0.1, 1.0, want_grad_norm=True)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_layers_have_rates_of_their_own(config: dict[str, Any]) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        blocks = nn.Sequential(*(nn.Sequential(nn.ModuleDict({"a": nn.Linear(4, 4)})) for _ in range(2)))
        return nn.ModuleDict({"stem": nn.Linear(4, 4), "blocks": blocks, "head": nn.Linear(4, 4)})

    model, other = net(), net()
    ours = build_optimizer(model, OptimConfig(weight_decay=0.1, layer_decay=0.5, **config), CPU)
    rates = {"stem": 0.125, "blocks.0": 0.25, "blocks.1": 0.5, "head": 1.0}
    groups = [
        {
            "params": [p for n, p in other.named_parameters() if n.startswith(start) and n.endswith(end)],
            "lr": 0.1 * rate,
            "weight_decay": 0.1 if end == "weight" else 0.0,
        }
        for start, rate in rates.items()
        for end in ("weight", "bias")
    ]
    arguments = {key: value for key, value in config.items() if key != "name"}
    theirs = CLASSES[config["name"]](groups, fused=True, **arguments)
    ours.lr = 0.1
    for _ in zip(gradients(model), gradients(other), strict=True):
        ours.step()
        theirs.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(other.named_parameters())[name]), name
