from collections.abc import Iterator

import pytest
import torch
from torch import nn

from configs.errors import ConfigError
from trainer.deterministic import ask_for_deterministic_kernels, layers_of, told_if_not_deterministic

NET = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(1)))


@pytest.fixture
def asked() -> Iterator[None]:
    ask_for_deterministic_kernels()
    yield
    ask_for_deterministic_kernels(wanted=False)


def refused() -> None:
    torch.zeros(3).put_(torch.tensor([1]), torch.tensor([2.0]))


def test_asked_and_taken_back(asked: None) -> None:
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.allow_tf32
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        refused()
    ask_for_deterministic_kernels(wanted=False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.allow_tf32
    refused()


def test_the_operation_and_its_layers_are_named(asked: None) -> None:
    said = "virtual_shards: put_ has no deterministic kernel on H200, and equal bits need one; use another layer or vir"
    with pytest.raises(ConfigError, match=said), told_if_not_deterministic(NET, "H200", is_asked=True):
        refused()
    with pytest.raises(RuntimeError, match="put_ does not"), told_if_not_deterministic(NET, "cpu", is_asked=False):
        refused()
    with pytest.raises(RuntimeError, match="other"), told_if_not_deterministic(NET, "cpu", is_asked=True):
        raise RuntimeError("other")
    assert layers_of("adaptive_max_pool2d_backward_cuda", NET) == ["0", "1.1"]
    assert layers_of("max_pool3d_with_indices_backward_cuda", NET) == []


def test_a_compiler_that_gives_up_is_told() -> None:
    class FailOnRecompileLimitHit(Exception):
        pass

    with (
        pytest.raises(ConfigError, match=r"compiled anew too often, .*; use compile: false"),
        told_if_not_deterministic(NET, "cpu", is_asked=True),
    ):
        raise FailOnRecompileLimitHit
