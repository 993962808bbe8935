from typing import Any

import pytest

from configs.errors import TrainingError
from configs.sections import ExpectConfig
from trainer.summary import _flat, check_expectations


def test_nested_settings_become_dotted_names() -> None:
    assert _flat({"a": 1, "b": {"c": None, "d": {"e": [1, 2]}}, "f": "x", "g": False}) == {
        "a": 1, "b.d.e": "[1, 2]", "f": "x", "g": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("expect", "metrics"),
    [
        ({}, {}),
        ({"min_top1": 0.9}, {"eval/top1": 0.9}),
        ({"min_top1": 0.9}, {"eval/top1": 0.1, "eval/ema_top1": 0.95}),
        ({"max_train_loss": 0.5}, {"train/loss": 0.49}),
    ],
)
def test_expectations_that_hold(expect: dict[str, Any], metrics: dict[str, float]) -> None:
    check_expectations(ExpectConfig(**expect), metrics)


@pytest.mark.parametrize(
    ("expect", "metrics", "told"),
    [
        ({"min_top1": 0.9}, {"eval/top1": 0.8999}, r"top-1 is 0.8999 and expect.min_top1 is 0.9"),
        ({"min_top1": 0.9}, {"eval/top1": 1.0, "eval/ema_top1": 0.5}, r"top-1 is 0.5000"),
        ({"max_train_loss": 0.5}, {"train/loss": 0.5}, r"train/loss is 0.5000 and expect.max_train_loss is 0.5"),
        ({"max_train_loss": 0.5}, {"train/loss": float("nan")}, r"train/loss is nan"),
        ({"max_train_loss": 0.5}, {}, r"train/loss is nan"),
    ],
)
def test_missed_expectations_are_told_with_both_numbers(
    expect: dict[str, Any], metrics: dict[str, float], told: str
) -> None:
    with pytest.raises(TrainingError, match=told):
        check_expectations(ExpectConfig(**expect), metrics)
