"""Counts against formulas worked out by hand; a multiply-add is two operations."""

import copy
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainer import flops
from trainer.flops import Flops, count_flops, is_cheap
from trainer.models import MLP, MnistCNN

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch._dynamo finds none, it puts one into the environment."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def counted(network: nn.Module, *batch: int) -> Flops:
    evaluated = copy.deepcopy(network).requires_grad_(False).eval()
    return count_flops(evaluated, network, batch, torch.float32)


def test_the_tutorials_net() -> None:
    layers = (784 * 128, 128 * 64, 64 * 10)
    forward = 2 * sum(layers)
    # Each layer's weight, and each one's input but the first's.
    backward = 2 * sum(layers) + 2 * sum(layers[1:])
    assert (forward, forward + backward) == (218_368, 454_400)
    assert counted(MLP(10, (1, 28, 28)), 64, 1, 28, 28) == Flops(forward, forward + backward)


def test_the_cnn_of_mnist() -> None:
    # Pixels of the answer x its channels x what each is the sum of: 28 -> 14 -> 14 -> 14 (pooled to 7) -> 7 -> 5.
    first = 14 * 14 * 32 * (1 * 4 * 4)
    others = 14 * 14 * 32 * (32 * 9) + 14 * 14 * 64 * (32 * 9) + 7 * 7 * 64 * (64 * 9) + 5 * 5 * 128 * (64 * 9)
    head = 128 * 10
    forward = 2 * (first + others + head)
    assert counted(MnistCNN(10, (1, 28, 28)), 8, 1, 28, 28) == Flops(forward, 3 * forward - 2 * first)


def test_the_memory_format_of_the_weights_changes_nothing() -> None:
    network = MnistCNN(10, (1, 28, 28))
    assert counted(network.to(memory_format=torch.channels_last), 8, 1, 28, 28) == counted(network, 8, 1, 28, 28)


class Behind(nn.Module):
    """A convolution whose images want a gradient too, since a 1x1 layer is in front of it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Conv2d(3, 8, 1), layer

    def forward(self, images: Tensor) -> Tensor:
        answer: Tensor = self.layer(self.first(images))
        return answer


@pytest.mark.parametrize(
    ("layer", "forward"),
    [
        (nn.Conv2d(8, 8, 3, padding=1, groups=8), 2 * 10 * 10 * 8 * 9),
        (nn.Conv2d(8, 16, 3, stride=2, groups=4), 2 * 4 * 4 * 16 * (2 * 9)),
        (nn.ConvTranspose2d(8, 4, 2, stride=2), 2 * 10 * 10 * 8 * (4 * 4)),
        (nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2), 2 * 10 * 10 * 8 * (2 * 4)),
    ],
)
def test_grouped_and_transposed_convolutions(layer: nn.Module, forward: int) -> None:
    first = 2 * 10 * 10 * 3 * 8
    assert counted(Behind(layer), 5, 3, 10, 10) == Flops(first + forward, 2 * first + 3 * forward)


def test_what_is_frozen_has_no_gradient() -> None:
    network = MLP(10, (1, 28, 28))
    network.layers[0].requires_grad_(False)
    first, others = 784 * 128, 128 * 64 + 64 * 10
    # The second layer's input is now the first thing that nobody wants a gradient of.
    assert counted(network, 8, 1, 28, 28) == Flops(2 * (first + others), 2 * (first + 2 * others + 64 * 10))


class Attention(nn.Module):
    """One head of 16 on the 64 pixels of an image; `looks` makes it need values."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(1, 16), nn.MultiheadAttention(16, 1, batch_first=True)
        self.looks = looks

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images.flatten(1).unsqueeze(2))
        if self.looks and tokens.max() > 1e6:
            tokens = tokens / 2
        answer: Tensor = self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1)
        return answer


ATTENTION = Flops(
    2 * 64 * (16 + 16 * 48 + 64 * 16 + 64 * 16 + 16 * 16),
    # Of the embedding only the weight's gradient, of the rest both.
    2 * 64 * (2 * 16 + 3 * (16 * 48 + 64 * 16 + 64 * 16 + 16 * 16)),
)


@pytest.mark.parametrize("looks", [False, True])
def test_attention_is_not_lost_in_one_kernel(looks: bool) -> None:
    assert counted(Attention(looks), 4, 1, 8, 8) == ATTENTION


def test_frozen_attention_is_not_lost_either() -> None:
    network = Attention(looks=True).requires_grad_(False)
    network.embed.weight.requires_grad_(True)
    assert counted(network, 4, 1, 8, 8).forward == ATTENTION.forward


class Recurrent(nn.Module):
    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(28, 64, batch_first=True), nn.Linear(64, 10)
        self.looks = looks

    def forward(self, images: Tensor) -> Tensor:
        if self.looks and images.max() > 1e6:
            images = images / 2
        answer: Tensor = self.head(self.layer(images.squeeze(1))[0][:, -1])
        return answer


def test_a_recurrent_layer_is_unrolled() -> None:
    assert counted(Recurrent(), 4, 1, 28, 28).forward == 2 * (28 * (28 * 256 + 64 * 256) + 64 * 10)


def test_what_cannot_be_counted_rightly_is_unknown() -> None:
    assert counted(Recurrent(looks=True), 4, 1, 28, 28) == Flops(
        0, 0, "RuntimeError: Tensor.item() cannot be called on meta tensors"
    )


class WithConstant(nn.Module):
    """A tensor that is neither parameter nor buffer stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(64, 4), torch.ones(64)

    def forward(self, images: Tensor) -> Tensor:
        answer: Tensor = self.head(images.flatten(1) * self.scale)
        return answer


def test_a_constant_of_the_networks_own_is_no_hindrance() -> None:
    assert counted(WithConstant(), 4, 1, 8, 8) == Flops(2 * 64 * 4, 4 * 64 * 4)


class Touchy(nn.Module):
    """Draws random numbers, counts its calls, and has all that training could feel."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4 * 36, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        answer: Tensor = self.head(self.features(images + torch.rand(1).item()).flatten(1))
        return answer


def test_nothing_that_training_feels_is_touched() -> None:
    network = Touchy()
    evaluated = copy.deepcopy(network).requires_grad_(False).eval()
    before = [copy.deepcopy(module.state_dict()) for module in (network, evaluated)]
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())  # the global one
    assert count_flops(evaluated, network, (4, 1, 8, 8), torch.float32).forward == 2 * (36 * 4 * 9 + 144 * 4)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), repr(np.random.get_state())) == states[1:]
    for module, was in zip((network, evaluated), before, strict=True):
        assert all(torch.equal(tensor, was[name]) for name, tensor in module.state_dict().items())
        assert all(parameter.grad is None for parameter in module.parameters())
    assert network.training
    assert not any(parameter.requires_grad for parameter in evaluated.parameters())


def test_a_compiled_network_is_counted_as_it_was_written() -> None:
    network = MLP(10, (1, 28, 28))
    network.compile(backend="eager")
    assert counted(network, 8, 1, 28, 28).total == 454_400


def test_an_import_of_seconds_is_made_only_where_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert [is_cheap(CPU, 0.0), is_cheap(CPU, 149.0), is_cheap(CPU, 151.0), is_cheap(CUDA, 0.0)] == [
        False, False, True, True,
    ]  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch._dynamo", flops)
    assert is_cheap(CPU, 0.0)
