import pytest
import torch
from torch import nn

from configs.errors import ConfigError
from configs.sections import ModelConfig, OptimConfig
from trainer.evaluate import evaluation_mode
from trainer.freeze import freeze, in_evaluation
from trainer.models import rank_bound_layers
from trainer.optim import build_optimizer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4))
        self.stage1 = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))
        self.head = nn.Linear(4, 3)


CONV, NORM = {"0.weight", "0.bias"}, {"1.weight", "1.bias"}
STEM, STAGE = ({f"{module}.{name}" for name in CONV | NORM} for module in ("stem", "stage1"))
HEAD = {"head.weight", "head.bias"}


def settings(freeze: list[str] | None = None, freeze_except: list[str] | None = None) -> ModelConfig:
    return ModelConfig.model_validate({"freeze": freeze or [], "freeze_except": freeze_except or []})


@pytest.mark.parametrize(
    ("named", "but", "trained", "norms"),
    [
        ([], [], STEM | STAGE | HEAD, set()),
        (["stem"], [], STAGE | HEAD, {"stem.1"}),
        (["stem", "stage?"], [], HEAD, {"stem.1", "stage1.1", "stage1.2"}),
        (["st*"], [], HEAD, {"stem.1", "stage1.1", "stage1.2"}),
        ([], ["head"], HEAD, {"stem.1", "stage1.1", "stage1.2"}),
        ([], ["head", "stage1.0"], HEAD | {"stage1.0.weight", "stage1.0.bias"}, {"stem.1", "stage1.1", "stage1.2"}),
        (["st*"], ["*.bias"], HEAD | {n for n in STEM | STAGE if n.endswith("bias")}, {"stage1.2"}),
        (["*.0.weight"], [], (STEM | STAGE | HEAD) - {"stem.0.weight", "stage1.0.weight"}, set()),
        (["stem.1"], [], (STEM | STAGE | HEAD) - {"stem.1.weight", "stem.1.bias"}, {"stem.1"}),
    ],
)
def test_what_is_named_does_not_train(named: list[str], but: list[str], trained: set[str], norms: set[str]) -> None:
    model = Net().train()
    found, lines = freeze(model, settings(named, but))
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained
    assert {name for name, module in model.named_modules() if any(module is norm for norm in found)} == norms
    assert len(lines) == bool(named or but)
    # Neither decay nor state for what is frozen.
    optimizer = build_optimizer(model, OptimConfig(name="adamw", lr=0.1, weight_decay=0.1), torch.device("cpu"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(parameter)] for parameter in optimizer.state} == trained


def test_the_plan_says_how_much_is_frozen() -> None:
    _, (line,) = freeze(Net(), settings(freeze_except=["head"]))
    # 2 x (4 + 4) of the first convolution and norm, 16 + 4 + 8 of the second, 12 + 3 of the head.
    assert line == "frozen     44 of 59 parameters; 3 BatchNorm layers in evaluation mode, statistics as they are"


@pytest.mark.parametrize(
    ("named", "but", "told"),
    [
        (["stagee1"], [], r"model.freeze: 'stagee1' is no parameter or module of the network; did you mean stage1"),
        ([], ["fc"], r"model.freeze_except: 'fc' is no .* network; it has stem, stage1, head"),
        (["stem", "conv*"], [], r"'conv\*' is no parameter or module"),
        (["*"], [], r"model.freeze: nothing is left to train"),
        (["stem", "stage1", "head"], [], r"nothing is left to train"),
        (["stem.1.running_mean"], [], r"is no parameter or module"),
    ],
)
def test_what_cannot_be_frozen_is_told(named: list[str], but: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        freeze(Net(), settings(named, but))


def test_one_name_needs_no_brackets() -> None:
    assert ModelConfig.model_validate({"freeze": "stem"}).freeze == ("stem",)


def test_frozen_norms_stay_in_evaluation_and_belong_to_no_rank() -> None:
    model = Net()
    norms, _ = freeze(model, settings(["stem"]))
    model.train()
    in_evaluation(norms)
    for _ in range(2):
        assert [module.training for module in (model, model.stem[1], model.stage1[1])] == [True, False, True]
        with evaluation_mode(model):
            assert not any(module.training for module in model.modules())
    assert [text.partition(" ")[0] for text in rank_bound_layers(model)] == ["stage1.1", "stage1.2"]
