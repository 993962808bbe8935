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
        blocks = (nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}) for _ in range(2))
        return nn.ModuleDict({"stem": nn.Linear(4, 4), "blocks": nn.Sequential(*blocks), "head": nn.Linear(4, 4)})

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


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.Linear(4, 6), nn.Linear(6, 3))


def theirs_of(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """What does the same in torch or timm, in the way of their own examples."""
    if name == "rmsprop":
        arguments = {"lr": 0.01, "alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1, "momentum": 0.8}
        return [torch.optim.RMSprop(model.parameters(), **arguments)]
    if name == "muon":
        inner = [model[1].weight]
        others = [p for p in model.parameters() if p is not inner[0]]
        muon = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
        adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), foreach=True)
        return [torch.optim.Muon(inner, **muon), adamw]
    optim = pytest.importorskip("timm.optim")
    if name == "lion":
        return [optim.Lion(model.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)]
    return [optim.Lamb(model.parameters(), lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, max_grad_norm=None)]


OTHERS: dict[str, dict[str, Any]] = {
    "rmsprop": {"betas": (0.9, 0.9), "eps": 1e-3, "momentum": 0.8},
    "lamb": {"betas": (0.8, 0.9), "eps": 1e-3},
    "lion": {"betas": (0.8, 0.9)},
    "muon": {"betas": (0.8, 0.9), "momentum": 0.95, "nesterov": True},
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_those_of_torch_and_timm(name: str) -> None:
    model, other = matrices(), matrices()
    theirs = theirs_of(name, other)
    settings = {"name": name, "weight_decay": 0.1, "decay_norm_and_bias": True} | OTHERS[name]
    ours = build_optimizer(model, OptimConfig.model_validate(settings), CPU)
    ours.lr = 0.01
    for _ in zip(gradients(model), gradients(other), strict=True):
        ours.step()
        for optimizer in theirs:
            optimizer.step()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, dict(other.named_parameters())[key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OTHERS)
def test_a_bad_batch_leaves_others_as_they_were(name: str) -> None:
    if name in ("lamb", "lion"):
        pytest.importorskip("timm")
    model = matrices()
    ours = build_optimizer(model, OptimConfig.model_validate({"name": name} | OTHERS[name]), CPU)
    next(gradients(model))
    ours.guard = torch.ones(())
    before = [p.clone() for p in model.parameters()]
    ours.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(not tensor.any() for state in ours.state.values() for tensor in state.values())
