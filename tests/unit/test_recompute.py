"""Gradient checkpointing changes nothing but memory."""

from typing import Any

import pytest
import torch
import torchvision.models  # so slow that the worker imports it only where it is asked for  # noqa: F401
from torch import Tensor, nn

from configs.errors import ConfigError
from configs.sections import ModelConfig
from trainer.models import build_model
from trainer.recompute import blocks, recompute

SIZE = 64


class Block(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.cumulative, self.drop = nn.BatchNorm2d(8, momentum=None), nn.Dropout(0.3)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        if self.inplace:
            x = x.relu_()
        return x + self.drop(self.cumulative(self.norm(self.first(x))))


class Own(nn.Module):
    """Norms with a momentum and without, dropout, one block frozen."""

    def __init__(self, num_classes: int, inplace: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(Block(inplace) for _ in range(4))
        self.head = nn.Linear(8, num_classes)
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def build(name: str, args: dict[str, Any] | None = None) -> nn.Module:
    return build_model(ModelConfig(name=name, args=args or {}), 10, (3, SIZE, SIZE), 0, torch.float32).train()


def bytes_kept(model: nn.Module, images: Tensor) -> tuple[Tensor, int]:
    """The network's answer, and the bytes that stay for its backward pass, without weights."""
    kept: dict[int, int] = {}
    weights = {tensor.data_ptr() for tensor in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        answer = model(images)
    return answer, sum(kept.values())


def state_after(model: nn.Module, passes: int = 2) -> tuple[dict[str, Tensor], int]:
    """Answers, gradients and buffers after some passes with accumulated gradients, and the bytes kept in the last."""
    torch.manual_seed(5)
    state, kept = {}, 0
    for number in range(passes):
        images = torch.rand(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(number))
        answer, kept = bytes_kept(model, images)
        answer.square().sum().backward()
        state[f"answer {number}"] = answer.detach()
    state |= {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return state | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}, kept


NETWORKS: list[tuple[str, dict[str, Any]]] = [
    (f"{__name__}:Own", {}),
    ("small_resnet", {"depth": 2}),
    ("resnet18", {}),
    ("densenet121", {}),  # its layers take a list that grows
    ("efficientnet_b0", {}),  # dropout, stochastic depth and BatchNorm
    ("vit_b_32", {"image_size": SIZE, "dropout": 0.1}),
    ("inception_v3", {}),  # blocks beside each other, in no Sequential
    ("timm/resnet18", {"drop_path_rate": 0.2}),
    ("timm/vit_tiny_patch16_224", {"img_size": SIZE, "proj_drop_rate": 0.1}),
]


@pytest.mark.parametrize(("name", "args"), NETWORKS, ids=[name.rpartition(":")[2] for name, _ in NETWORKS])
def test_same_answers_gradients_and_statistics_with_less_memory(
    name: str, args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("timm/"):
        pytest.importorskip("timm")
    if name == "inception_v3":
        monkeypatch.setattr(f"{__name__}.SIZE", 96)
    plain, with_less = build(name, args), build(name, args)
    assert "gradient checkpointing" in recompute(with_less)
    (expected, much), (found, less) = state_after(plain), state_after(with_less)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    assert less < 0.7 * much


def test_statistics_would_move_twice_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can see it."""
    monkeypatch.setattr("trainer.recompute._keep_statistics", lambda model: None)
    plain, twice = build("small_resnet"), build("small_resnet")
    recompute(twice)
    (expected, _), (found, _) = state_after(plain), state_after(twice)
    wrong = [key for key in expected if not torch.equal(found[key], expected[key])]
    assert any("running_mean" in key for key in wrong)
    assert any("num_batches_tracked" in key for key in wrong)


def test_evaluation_is_left_alone() -> None:
    model = build(f"{__name__}:Own")
    recompute(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    answer, kept = bytes_kept(model.eval(), torch.rand(2, 3, SIZE, SIZE))
    answer.sum().backward()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert kept > bytes_kept(model.train(), torch.rand(2, 3, SIZE, SIZE))[1]


def test_a_block_that_writes_into_its_input_is_an_error() -> None:
    """Torch's own: its gradient would be wrong."""
    model = build(f"{__name__}:Own", {"inplace": True})
    recompute(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.rand(2, 3, SIZE, SIZE)).sum().backward()


@pytest.mark.parametrize(
    ("name", "kinds", "number"),
    [
        ("resnet50", {"Bottleneck"}, 16),
        ("vit_b_16", {"EncoderBlock"}, 12),
        ("mnasnet0_5", {"_InvertedResidual"}, 16),
        ("squeezenet1_0", {"Fire"}, 8),
        ("regnet_x_400mf", {"ResBottleneckBlock"}, 22),
        ("small_resnet", {"ResidualBlock"}, 9),
    ],
)
def test_blocks_are_those_of_the_papers(name: str, kinds: set[str], number: int) -> None:
    found = list(blocks(build(name)))
    assert {type(block).__name__ for block in found} == kinds
    assert len(found) == number


@pytest.mark.parametrize("name", ["mlp", "vgg11", "alexnet"])
def test_a_network_without_blocks_is_told(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model.checkpointing: the network has no blocks"):
        recompute(build(name))
