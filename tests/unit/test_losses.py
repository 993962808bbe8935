"""Right values by hand, in plain Python."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.loss_section import LossConfig
from trainer.losses import LOSSES, class_weights

LOGITS = [[2.0, -1.0, 0.5], [0.0, 1.0, -2.0]]
MIXED = [[0.7, 0.3, 0.0], [0.0, 0.5, 0.5]]


def loss(config: LossConfig, targets: Any, weight: list[float] | None = None, logits: Any = LOGITS) -> float:
    values = torch.tensor(logits, dtype=torch.float64)
    targets = torch.tensor(targets, dtype=torch.float64) if isinstance(targets[0], list) else torch.tensor(targets)
    weights = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    return float(LOSSES[config.name](config, weights, values, targets))


def log_softmax(row: list[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in row))
    return [value - total for value in row]


def entropy_by_hand(shares: list[list[float]], weight: list[float]) -> float:
    return -sum(
        share * own * log
        for row, logits in zip(shares, LOGITS, strict=True)
        for share, own, log in zip(row, weight, log_softmax(logits), strict=True)
    )


@pytest.mark.parametrize("weight", [[1.0, 1.0, 1.0], [0.5, 2.0, 3.0]])
@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_classes_and_shares_give_the_same(name: Any, weight: list[float]) -> None:
    logits = LOGITS if name == "cross_entropy" else [log_softmax(row) for row in LOGITS]
    sharp = [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    config = LossConfig(name=name)
    for targets, shares in (([1, 0], sharp), (sharp, sharp), (MIXED, MIXED)):
        assert loss(config, targets, weight, logits) == pytest.approx(entropy_by_hand(shares, weight))


def test_smoothing_spreads_a_share_over_all_classes() -> None:
    smoothed = [[0.9 * share + 0.1 / 3 for share in row] for row in MIXED]
    assert loss(LossConfig(label_smoothing=0.1), MIXED) == pytest.approx(entropy_by_hand(smoothed, [1.0] * 3))


def bce_by_hand(shares: list[list[float]], per_sample: list[float]) -> float:
    def one(share: float, logit: float) -> float:
        yes = 1 / (1 + math.exp(-logit))
        return -share * math.log(yes) - (1 - share) * math.log(1 - yes)

    rows = zip(per_sample, shares, LOGITS, strict=True)
    return sum(own * one(s, x) for own, row, logits in rows for s, x in zip(row, logits, strict=True))


@pytest.mark.parametrize("weight", [[1.0, 1.0, 1.0], [0.5, 2.0, 3.0]])
def test_each_class_is_a_yes_or_no(weight: list[float]) -> None:
    sharp = [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    total = bce_by_hand(sharp, [weight[1], weight[0]])
    assert loss(LossConfig(name="bce", bce_sum=True), [1, 0], weight) == pytest.approx(total)
    assert loss(LossConfig(name="bce"), [1, 0], weight) == pytest.approx(total / 3)
    smoothed = [[0.9 * share + 0.1 / 3 for share in row] for row in MIXED]
    assert loss(LossConfig(name="bce", label_smoothing=0.1), MIXED, weight) == pytest.approx(
        bce_by_hand(smoothed, [sum(w * s for w, s in zip(weight, row, strict=True)) for row in MIXED]) / 3
    )


def test_shares_above_the_threshold_are_a_yes() -> None:
    config = LossConfig(name="bce", bce_target_threshold=0.4, bce_sum=True)
    assert loss(config, MIXED) == pytest.approx(bce_by_hand([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], [1.0] * 2))


def test_balanced_weights_let_every_class_count_the_same() -> None:
    labels = torch.tensor([0] * 6 + [1] * 3 + [2] * 3)
    weights = class_weights(LossConfig(class_weights="balanced"), 3, labels)
    assert weights is not None
    assert weights.tolist() == pytest.approx([12 / (3 * 6), 12 / (3 * 3), 12 / (3 * 3)])
    assert float(weights[labels].mean()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("given", "labels", "said"),
    [
        ((1.0, 2.0), torch.tensor([0, 1, 2]), "has 2 numbers for 3 classes"),
        ("balanced", torch.tensor([0, 2]), "class 1 has no sample to train on"),
        ("balanced", None, "needs labels that are known beforehand"),
    ],
)
def test_weights_that_do_not_fit(given: Any, labels: Tensor | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        class_weights(LossConfig(class_weights=given), 3, labels)


@pytest.mark.parametrize("settings", [{"bce_sum": True}, {"name": "nll", "label_smoothing": 0.1}])
def test_settings_of_another_loss_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="bce"):
        LossConfig(**settings)
