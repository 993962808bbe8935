"""Ten answers of three classes, of which one has no sample; all values by hand."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch

from trainer.details import Details, confidence_in_bins, confusion_of, write_details

LABELS = [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
ANSWERS = [0, 0, 0, 1, 1, 1, 1, 1, 2, 0]
# The largest softmax output of each, and what that leaves for the other two.
SURE = [0.9, 0.9, 0.6, 0.6, 0.9, 0.9, 0.9, 0.6, 0.6, 0.6]
NAMES = ["cat", "dog, small", "fox"]


@pytest.fixture
def details() -> Details:
    labels, answers = torch.tensor(LABELS), torch.tensor(ANSWERS)
    rows = [[math.log(p if k == a else (1 - p) / 2) for k in range(3)] for a, p in zip(ANSWERS, SURE, strict=True)]
    counts, confidence = confidence_in_bins(torch.tensor(rows, dtype=torch.float64), labels, torch.float64)
    return Details(confusion_of(answers, labels, 3), *counts, confidence)


def test_who_is_taken_for_whom(details: Details) -> None:
    assert details.confusion.tolist() == [[3, 1, 0], [1, 4, 1], [0, 0, 0]]
    assert details.recall() == [3 / 4, 4 / 6, None]
    assert details.precision() == [3 / 4, 4 / 5, 0.0]
    assert details.balanced_accuracy() == pytest.approx((3 / 4 + 4 / 6) / 2)


def test_calibration(details: Details) -> None:
    # 0.9 is in bin 14 of (13/15, 14/15], counted from 1: five answers, all right. 0.6 is 9/15: five, of which two.
    assert {n: count for n, count in enumerate(details.answers.tolist()) if count} == {8: 5, 13: 5}
    assert details.right.tolist()[8] == 2
    assert details.right.tolist()[13] == 5
    assert details.calibration_error() == pytest.approx((abs(5 * 0.6 - 2) + abs(5 * 0.9 - 5)) / 10)


def test_what_is_written(details: Details, tmp_path: Path) -> None:
    (line,) = write_details(tmp_path, {"ema": details}, NAMES)
    assert line == (
        "classes EMA: balanced accuracy 70.83 %  calibration error 0.1500  least found: dog, small 66.7 %, cat 75.0 %"
    )
    found = json.loads((tmp_path / "evaluation.json").read_text())["ema"]
    assert found["classes"][1] == {
        "class": "dog, small",
        "count": 6,
        "recall": pytest.approx(2 / 3),
        "precision": 0.8,
        "f1": pytest.approx(2 * (2 / 3) * 0.8 / (2 / 3 + 0.8)),
    }
    assert found["classes"][2]["recall"] is None
    assert found["calibration"][0] == {"from": 0.0, "to": 1 / 15, "count": 0}
    assert found["calibration"][13]["accuracy"] == 1.0
    rows = list(csv.reader((tmp_path / "confusion_ema.csv").read_text(encoding="utf-8").splitlines()))
    assert rows == [["class \\ answer", *NAMES], ["cat", "3", "1", "0"], ["dog, small", "1", "4", "1"], ["fox", *"000"]]


def test_sure_to_the_last_bit_is_in_the_last_bin() -> None:
    counts, _ = confidence_in_bins(torch.tensor([[1000.0, 0.0]]), torch.tensor([0]), torch.float32)
    assert counts[0].tolist() == [0] * 14 + [1]
