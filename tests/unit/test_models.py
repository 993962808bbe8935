from typing import Any

import pytest
import torch
import torchvision.models  # so slow that the worker imports it only where it is asked for
from torch import nn

from configs.errors import ConfigError
from configs.known_models import BUILT_IN_MODELS
from configs.sections import ModelConfig
from trainer.models import BUILT_IN, build_model, may_draw, random_layers

SHAPE = (1, 28, 28)


def build(
    name: str, args: dict[str, Any] | None = None, shape: tuple[int, int, int] = SHAPE, seed: int = 0
) -> nn.Module:
    return build_model(ModelConfig(name=name, args=args or {}), 10, shape, seed, torch.float32)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_schema_and_trainer_know_the_same_names() -> None:
    assert set(BUILT_IN) == set(BUILT_IN_MODELS)


@pytest.mark.parametrize(("name", "side"), [("mnist_cnn", 12), ("whitened_cnn", 9)])
def test_the_smallest_images_that_a_network_takes(name: str, side: int) -> None:
    assert build(name, shape=(1, side, side))(torch.rand(2, 1, side, side)).shape == (2, 10)
    with pytest.raises(
        ConfigError, match=rf"{name} takes images of {side} x {side} pixels or more, not {side} x {side - 1}"
    ):
        build(name, shape=(1, side, side - 1))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_built_in_networks_answer_and_learn(name: str, shape: tuple[int, int, int]) -> None:
    model = build(name, shape=shape)
    logits = model(torch.rand(2, *shape))
    assert logits.shape == (2, 10)
    logits.sum().backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())


def test_mlp_is_the_tutorials_network() -> None:
    # 784-128-64-10 with biases.
    assert parameters(build("mlp")) == 784 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10
    probabilities = build("mlp", {"log_softmax": True})(torch.rand(3, *SHAPE)).exp().sum(1)
    torch.testing.assert_close(probabilities, torch.ones(3))


def test_mlp_agrees_with_plain_torch() -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    images = torch.rand(5, *SHAPE)
    assert torch.equal(build("mlp", {"hidden": [32]}, seed=3)(images), plain(images))


def test_small_resnet_is_resnet_20() -> None:
    # He et al., table 6: 0.27 M. 269,722 with parameter-free shortcuts; the two 1x1 projections are 2,752 more.
    model = build("small_resnet", shape=(3, 32, 32))
    assert parameters(model) == 269_722 + 16 * 32 + 64 + 32 * 64 + 128
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in model.modules()) == 19


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(99)
    first = build("mlp", seed=5).state_dict()
    torch.rand(7)
    again, other = build("mlp", seed=5).state_dict(), build("mlp", seed=6).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layers.0.weight"], other["layers.0.weight"])


def test_float64_network() -> None:
    model = build_model(ModelConfig(name="mlp"), 10, SHAPE, 0, torch.float64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


def not_a_module(num_classes: int) -> str:
    return "text"


def takes_width(num_classes: int, width: int) -> nn.Module:
    return nn.Linear(width, num_classes)


def test_callable_gets_the_classes_and_its_arguments() -> None:
    assert build(f"{__name__}:takes_width", {"width": 3}).weight.shape == (10, 3)


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("mlp", {"widht": 3}, r"model.args do not fit mlp: .*'widht'.*it takes \(num_classes"),
        (f"{__name__}:takes_width", {}, r"model.args do not fit .*'width'"),
        (f"{__name__}:not_a_module", {}, r"gave a str; wanted is a torch.nn.Module"),
        (f"{__name__}:nothing_here", {}, r"has no 'nothing_here'"),
        (f"{__name__}:SHAPE", {}, r"is a tuple, not callable"),
        ("no_such_module_731:net", {}, r"there is no module 'no_such_module_731'"),
        ("torchvision/no_such_net", {}, r"torchvision has no model 'no_such_net'"),
    ],
)
def test_what_cannot_be_built_is_told(name: str, args: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build(name, args)


def test_torchvision_network() -> None:
    assert parameters(build("torchvision/squeezenet1_1", shape=(3, 64, 64))) == 722_496 + 512 * 10 + 10


class DropPath(nn.Module):
    """Like timm's."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob


def test_layers_that_draw_are_told_from_those_that_do_not() -> None:
    model = nn.ModuleDict(
        {
            "dropout": nn.Dropout(0.5),
            "channels": nn.Dropout2d(1),
            "never": nn.Dropout(0.0),
            "rrelu": nn.RReLU(),
            "attention": nn.MultiheadAttention(4, 1, dropout=0.1),
            "lstm": nn.LSTM(2, 2, num_layers=2, dropout=0.1),
            "gru": nn.GRU(2, 2),
            "path": DropPath(0.1),
            "still": DropPath(0.0),
            "depth": torchvision.ops.StochasticDepth(0.2, "row"),
            "norm": nn.BatchNorm2d(2),
            "distance": nn.PairwiseDistance(p=2.0),
        }
    )
    assert random_layers(model) == ["dropout", "channels", "rrelu", "attention", "lstm", "path", "depth"]
    assert random_layers(nn.Dropout(0.1)) == ["Dropout"]
    assert random_layers(build("mnist_cnn")) == []


class Columns(nn.Module):
    """Every second column of a tensor, and a transposed one."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.randn(3, 2 * num_classes)[:, ::2])
        self.transposed = nn.Parameter(torch.randn(num_classes, 3).t())


def test_parameters_are_blocks_of_memory() -> None:
    """A fused kernel would write the other columns, and not the last rows of these."""
    model = build(f"{__name__}:Columns")
    torch.manual_seed(0)
    unchanged = Columns(10)
    assert unchanged.columns.stride() == (20, 2)
    assert model.get_parameter("columns").stride() == (10, 1)
    assert model.get_parameter("transposed").stride() == (1, 3)
    assert all(torch.equal(p, unchanged.get_parameter(name)) for name, p in model.named_parameters())


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_networks_draw_nothing(name: str) -> None:
    model, images = build(name).train(), torch.rand(4, 1, 28, 28)
    assert not may_draw(model)
    before = torch.random.get_rng_state()
    model(images).sum().backward()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_any_other_network_may_draw() -> None:
    assert may_draw(nn.Linear(1, 1))
