import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.utils  # imported late by torch, and changes the environment
from torch import Tensor, nn
from torchvision.models import resnet18, vit_b_16

from configs.errors import ConfigError
from configs.sections import OptimConfig
from trainer.optim import (
    Ema,
    apply_update,
    averaged_tensors,
    build_optimizer,
    layer_scales,
    parameter_groups,
    persistent_buffers,
)
from trainer.optimizer import Optimizer

CPU = torch.device("cpu")
INFINITE = [float("inf"), 1.0]


class Weights(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values))


def backward(scaler: torch.amp.GradScaler | None, model: Weights, gradient: list[float]) -> None:
    """Have `gradient` be the true gradient of the weights, added to what is there."""
    loss = (model.w * torch.tensor(gradient)).sum()
    (loss if scaler is None else scaler.scale(loss)).backward()


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def update(optimizer: Optimizer, scaler: torch.amp.GradScaler | None, lr: float, clip: float | None = None) -> Any:
    return apply_update(optimizer, scaler, lr, clip, want_grad_norm=True)


@pytest.mark.parametrize(
    "config",
    [
        {"name": "sgd", "fused": False},
        {"name": "sgd", "fused": True},
        {"name": "sgd", "fused": None, "momentum": 0.9},
        {"name": "sgd", "fused": True, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"name": "adam", "fused": False},
        {"name": "adam", "fused": True},
        {"name": "adamw", "fused": False},
        {"name": "adamw", "fused": True},
        {"name": "adamw", "fused": None, "weight_decay": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_overflow_changes_nothing_but_the_scale(config: dict[str, Any], clip: float | None) -> None:
    model = Weights(1.0, 2.0)
    optimizer = build_optimizer(model, OptimConfig(**config), CPU)
    scaler = torch.amp.GradScaler("cpu", init_scale=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(scaler, model, INFINITE)
        skipped = update(optimizer, scaler, 0.1, clip)
        assert model.w.tolist() == [1.0, 2.0]
        assert not skipped.applied
        assert scaler.get_scale() == 2.0
        model.zero_grad()
        backward(scaler, model, [1.0, 1.0])
        applied = update(optimizer, scaler, 0.1, clip)
    assert applied.applied
    assert scaler.get_scale() == 2.0
    # As if the overflow had never been.
    other = Weights(1.0, 2.0)
    optimizer = build_optimizer(other, OptimConfig(**config), CPU)
    backward(None, other, [1.0, 1.0])
    update(optimizer, None, 0.1, clip)
    assert model.w.tolist() == other.w.tolist()
    assert other.w.tolist() != [1.0, 2.0]


def test_growing_scale_is_no_overflow() -> None:
    model = Weights(1.0)
    optimizer = build_optimizer(model, OptimConfig(), CPU)
    scaler = torch.amp.GradScaler("cpu", init_scale=4, growth_interval=1)
    backward(scaler, model, [1.0])
    assert update(optimizer, scaler, 0.1).applied
    assert scaler.get_scale() == 8.0


def test_skipped_update_leaves_adams_step_counter() -> None:
    model = Weights(1.0)
    optimizer = build_optimizer(model, OptimConfig(name="adamw", lr=0.1), CPU)
    scaler = torch.amp.GradScaler("cpu", init_scale=4)
    for gradient in (INFINITE[:1], [3.0]):
        model.zero_grad()
        backward(scaler, model, gradient)
        update(optimizer, scaler, 0.1)
    assert float(optimizer.state[model.w]["step"]) == 1
    # Adam's first step is lr * sign(gradient), up to eps.
    assert model.w.item() == pytest.approx(0.9, abs=1e-6)


def windows(scaler: torch.amp.GradScaler | None) -> tuple[list[float], list[list[float]]]:
    """Three windows of two micro-batches whose true gradient sums to norm 10; returns the norms and the weights."""
    model = Weights(1.0, 1.0)
    optimizer = build_optimizer(model, OptimConfig(), CPU)
    norms, weights = [], []
    for _ in range(3):
        model.zero_grad()
        backward(scaler, model, [2.0, 5.0])
        backward(scaler, model, [4.0, 3.0])
        norms.append(float(update(optimizer, scaler, 1.0, clip=1.0).grad_norm))
        weights.append(model.w.tolist())
    return norms, weights


@pytest.mark.parametrize("scaled", [False, True])
def test_clipping_sees_the_true_gradient_once_a_window(scaled: bool) -> None:
    norms, weights = windows(torch.amp.GradScaler("cpu", init_scale=1024) if scaled else None)
    assert norms == pytest.approx([10.0] * 3, abs=1e-5)
    # The clipped gradient is (0.6, 0.8), of norm 1, and lr is 1.
    for k, pair in enumerate(weights):
        assert pair == pytest.approx([1 - 0.6 * (k + 1), 1 - 0.8 * (k + 1)], abs=1e-5)


def test_small_gradients_are_not_clipped_and_the_norm_is_left_out_unless_wanted() -> None:
    model = Weights(1.0, 1.0)
    optimizer = build_optimizer(model, OptimConfig(), CPU)
    backward(None, model, [0.3, 0.4])
    result = apply_update(optimizer, None, 1.0, 1.0, want_grad_norm=False)
    assert float(result.grad_norm or 0) == pytest.approx(0.5)
    assert model.w.tolist() == pytest.approx([0.7, 0.6])
    backward(None, model, [0.3, 0.4])
    assert apply_update(optimizer, None, 1.0, None, want_grad_norm=False).grad_norm is None


def test_learning_rate_is_the_one_that_is_given() -> None:
    model = Weights(1.0)
    optimizer = build_optimizer(model, OptimConfig(lr=123.0), CPU)
    backward(None, model, [1.0])
    update(optimizer, None, 0.25)
    assert model.w.item() == 0.75


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3))


@pytest.mark.parametrize("decay_all", [False, True])
def test_norms_and_biases_do_not_decay(decay_all: bool) -> None:
    model = net()
    groups = parameter_groups(model, OptimConfig(weight_decay=0.1, decay_norm_and_bias=decay_all))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    everything = {names[id(p)] for group in groups for p in group["params"]}
    assert everything == {name for name, _ in model.named_parameters()}
    assert decayed == (everything if decay_all else {"0.weight", "3.weight"})


def test_norms_and_biases_learn_at_a_rate_of_their_own_and_decay_as_before() -> None:
    """One step of SGD from ones, gradient one: 1 - lr (64 + 0.1 / 64 64) and 1 - lr (1 + 0.1)."""
    model = net()
    config = OptimConfig(lr=0.01, weight_decay=0.1, decay_norm_and_bias=True, norm_and_bias_lr=64)
    optimizer = build_optimizer(model, config, CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.ones_like(parameter)
    update(optimizer, None, 0.01)
    for name, parameter in model.named_parameters():
        expected = 1 - 0.01 * 1.1 if name in ("0.weight", "3.weight") else 1 - 0.01 * 64.1
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, expected))


def test_without_gradient_only_the_decaying_weights_shrink() -> None:
    model = net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimConfig(name="adamw", lr=0.5, weight_decay=0.1), CPU)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    update(optimizer, None, 0.5)
    for name, parameter in model.named_parameters():
        factor = 0.95 if name in ("0.weight", "3.weight") else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_frozen_parameters_are_left_out() -> None:
    model = net()
    model[0].requires_grad_(False)  # type: ignore[index]
    groups = parameter_groups(model, OptimConfig())
    assert sum(len(group["params"]) for group in groups) == 6


@pytest.mark.parametrize(
    "config", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"name": "adam"}, {"name": "adamw"}], ids=str
)
def test_fused_and_plain_optimizers_agree(config: dict[str, Any]) -> None:
    results = []
    for fused in (False, True):
        model = Weights(1.0, -2.0)
        optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.01, fused=fused, **config), CPU)
        for k in range(5):
            model.zero_grad()
            backward(None, model, [1.0 + k, -2.0])
            update(optimizer, None, 0.1)
        results.append(model.w.detach().clone())
    torch.testing.assert_close(results[0], results[1])


def test_ema_agrees_with_the_formula_in_float64() -> None:
    model = nn.Linear(3, 2).double()
    ema = Ema(model, half_life_samples=50.0)
    expected = {name: tensor.detach().numpy().copy() for name, tensor in model.named_parameters()}
    rng = np.random.default_rng(0)
    for k in range(1, 80):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.from_numpy(rng.normal(size=tuple(parameter.shape)))
        ema.update(8, 8 * k, None)
        keep = 0.5 ** (8 / min(50.0, 8 * k / 10)) if 8 * k > 10 else 0.5**8
        for name, parameter in model.named_parameters():
            expected[name] = keep * expected[name] + (1 - keep) * parameter.detach().numpy()
    for name, value in expected.items():
        np.testing.assert_allclose(ema.tensors[name].numpy(), value, rtol=1e-12)


@pytest.mark.parametrize("batch", [1, 10, 100])
def test_ema_half_life_is_in_samples(batch: int) -> None:
    model = Weights(0.0)
    ema = Ema(model, half_life_samples=100.0)
    with torch.no_grad():
        model.w.fill_(1.0)
    for k in range(100 // batch):
        ema.update(batch, 10_000 + batch * (k + 1), None)
    assert ema.tensors["w"].item() == pytest.approx(0.5, abs=1e-6)


def test_ema_averages_floating_buffers_and_leaves_integers_out() -> None:
    model = nn.BatchNorm1d(2)
    ema = Ema(model, half_life_samples=1.0)
    assert set(ema.tensors) == {"weight", "bias", "running_mean", "running_var"}
    model.running_mean.fill_(8.0)  # type: ignore[union-attr,operator]
    ema.update(1, 1000, None)
    assert ema.tensors["running_mean"].tolist() == [4.0, 4.0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("not_kept", torch.ones(1), persistent=False)


def test_tied_weights_are_one_and_passing_buffers_are_none() -> None:
    assert set(averaged_tensors(Tied())) == {"a.weight", "kept"}
    assert set(persistent_buffers(Tied())) == {"kept"}


def test_averaged_tensors_are_the_live_ones() -> None:
    model = nn.BatchNorm1d(2)
    live: dict[str, Tensor] = averaged_tensors(model)
    assert live["running_mean"] is model.running_mean
    assert live["weight"] is model.weight


def test_layers_of_well_known_networks() -> None:
    scales = layer_scales(resnet18(), 0.5)
    assert scales["conv1.weight"] == 0.5**9
    assert scales["layer1.0.conv1.weight"] == 0.5**8
    assert scales["layer4.1.bn2.bias"] == 0.5
    assert scales["fc.weight"] == 1.0
    scales = layer_scales(vit_b_16(), 0.75)
    assert scales["class_token"] == scales["conv_proj.weight"] == scales["encoder.pos_embedding"] == 0.75**13
    assert scales["encoder.layers.encoder_layer_11.mlp.0.weight"] == 0.75
    assert scales["encoder.ln.weight"] == scales["heads.head.weight"] == 1.0
    with pytest.raises(ConfigError, match="no sequence of blocks"):
        layer_scales(nn.Linear(1, 1), 0.5)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto"])
def test_layers_and_decay_of_a_network_of_timm_are_those_of_its_own_training(name: str) -> None:
    timm = pytest.importorskip("timm")
    from timm.optim._param_groups import param_groups_layer_decay

    model = timm.create_model(name)
    spared = getattr(model, "no_weight_decay", set)()
    theirs = {
        id(parameter): (group["lr_scale"], group["weight_decay"])
        for group in param_groups_layer_decay(model, 0.05, spared, layer_decay=0.75)
        for parameter in group["params"]
    }
    ours = {
        id(parameter): (group["lr_scale"], group["weight_decay"])
        for group in parameter_groups(model, OptimConfig(name="adamw", weight_decay=0.05, layer_decay=0.75))
        for parameter in group["params"]
    }
    assert ours.keys() == theirs.keys()
    for key, values in ours.items():
        assert values == pytest.approx(theirs[key])


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.head_dist = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)


def test_muon_takes_no_head() -> None:
    model = TwoHeads()
    groups = parameter_groups(model, OptimConfig(name="muon", momentum=0.9))
    by_muon = [parameter for group in groups if group["update"] == "muon" for parameter in group["params"]]
    assert [id(parameter) for parameter in by_muon] == [id(model.inner.weight)]
