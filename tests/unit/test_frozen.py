import copy

import pytest
import torch
from torch import nn
from torchvision.models import resnet18, vit_b_16

from configs.errors import ConfigError
from trainer.frozen import freeze, recompute_blocks


def test_the_last_pattern_that_fits_counts() -> None:
    model = resnet18(num_classes=3)
    said = freeze(model, ["*", "!fc.*", "!layer4.*", "layer4.0.*"])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith(("fc.", "layer4.1."))}
    total, own = (sum(p.numel() for p in model.parameters() if p.requires_grad >= wanted) for wanted in (False, True))
    # 20 BatchNorm layers, of which the second block of the last stage trains two
    assert said == f"frozen     {total - own:,} of {total:,} parameters; 18 BatchNorm layers keep their statistics"


def test_frozen_norms_use_and_keep_their_statistics_in_training() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2))
    freeze(model, ["0.*", "1.*"])
    twin = copy.deepcopy(model).train()
    images = torch.rand(4, 1, 8, 8)
    inner = twin[:2](images)
    torch.testing.assert_close(inner, model[0](images) / (1 + 1e-5) ** 0.5)  # mean 0, variance 1, as at the start
    twin(images)
    assert torch.equal(twin[1].running_mean, torch.zeros(2))
    assert not torch.equal(twin[3].running_mean, torch.zeros(2))


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["fx.*"], r"'fx\.\*' is no parameter's name"),
        (["*"], "nothing is left to train"),
        (["fc.weigth"], "'fc.weight'"),
    ],
)
def test_patterns_that_are_of_no_use(patterns: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        freeze(resnet18(), patterns)


def blocks() -> nn.Module:
    def block() -> nn.Module:
        inner = nn.ModuleDict(
            {"norm": nn.BatchNorm2d(2), "drop": nn.Dropout(0.5), "conv": nn.Conv2d(2, 2, 3, padding=1)}
        )
        inner.forward = lambda x: x + inner["conv"](inner["drop"](inner["norm"](x)))
        return inner

    torch.manual_seed(0)
    return nn.Sequential(block(), block())


def trained(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    images = torch.rand(4, 2, 6, 6)
    (model(images) ** 2).sum().backward()
    return [p.grad for p in model.parameters()] + list(model.buffers())


def test_computing_blocks_twice_changes_no_bit() -> None:
    once, twice = blocks(), blocks()
    assert recompute_blocks(twice) == "memory     2 blocks are computed again in the backward pass"
    for expected, found in zip(trained(once), trained(twice), strict=True):
        assert torch.equal(expected, found)


def test_blocks_of_well_known_networks() -> None:
    assert "8 blocks" in recompute_blocks(resnet18())
    assert "12 blocks" in recompute_blocks(vit_b_16())
    with pytest.raises(ConfigError, match="no sequence of blocks"):
        recompute_blocks(nn.Sequential(nn.Linear(1, 1)))
