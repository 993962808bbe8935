"""Ten answers of three classes, of which one has no sample; all values by hand."""

import csv
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer import details as module
from trainer.calibration import BINS, Calibration, confidence_of, in_bins
from trainer.details import Details, write_details

SAMPLES, ANSWERS, RIGHT = [4, 6, 0], [4, 5, 1], [3, 4, 0]
CONFUSION = [[3, 1, 0], [1, 4, 1], [0, 0, 0]]
# Confidence 0.9, in (13/15, 14/15]: five answers, all right. 0.6 is 9/15 and so in (8/15, 9/15]: five, of which two.
IN_BINS, RIGHT_IN_BINS, SUMS = {8: 5, 13: 5}, {8: 2, 13: 5}, {8: 5 * 0.6, 13: 5 * 0.9}
ECE = (abs(3.0 - 2) + abs(4.5 - 5)) / 10
NAMES = ["cat", "dog, small", "fox"]
FACTS = {"checkpoint": "step_00000008"}


def filled(values: dict[int, float], dtype: torch.dtype) -> Tensor:
    return torch.tensor([values.get(number, 0) for number in range(BINS)], dtype=dtype)


@pytest.fixture
def details() -> Details:
    counts = filled(IN_BINS, torch.int64), filled(RIGHT_IN_BINS, torch.int64)
    bins = Calibration(*counts, filled(SUMS, torch.float64))
    return Details(*map(torch.tensor, (SAMPLES, ANSWERS, RIGHT, CONFUSION)), bins)


def test_each_class(details: Details) -> None:
    assert details.recall() == [3 / 4, 4 / 6, None]
    assert details.precision() == [3 / 4, 4 / 5, 0.0]
    assert details.f1() == pytest.approx([3 / 4, 8 / 11, None])
    assert details.metrics() == pytest.approx({"balanced_accuracy": (3 / 4 + 4 / 6) / 2, "ece": ECE})


def test_a_class_that_is_never_right_and_one_that_is_never_named() -> None:
    # Class 0 has two samples, taken for class 1; nobody answers 0.
    none = Calibration(filled({14: 3}, torch.int64), filled({14: 1}, torch.int64), filled({14: 3.0}, torch.float64))
    details = Details(*map(torch.tensor, ([2, 1], [0, 3], [0, 1], [[0, 2], [0, 1]])), none)
    assert details.recall() == [0.0, 1.0]
    assert details.precision() == [None, 1 / 3]
    assert details.f1() == [0.0, 0.5]
    assert details.balanced_accuracy() == 0.5
    assert details.calibration.error() == pytest.approx(2 / 3)


def test_what_is_written(details: Details, tmp_path: Path) -> None:
    lines = write_details(tmp_path, {"raw": details, "ema": details}, NAMES, FACTS)
    some = "70.83 % of the 2 of 3 classes that have samples  ECE 0.1500"
    worst = "dog, small 66.67 % of 6; cat 75.00 % of 4"
    assert lines == [
        f"classes: balanced accuracy {some}",
        f"least found: {worst}",
        f"classes EMA: balanced accuracy {some}",
        f"least found EMA: {worst}",
    ]
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["checkpoint"] == "step_00000008"
    assert "1706.04599" in found["definition_of_ece"]
    assert found["raw"] == found["ema"]
    assert found["ema"]["classes"] == [
        {"class": "cat", "count": 4, "correct": 3, "predicted": 4, "recall": 0.75, "precision": 0.75, "f1": 0.75},
        {"class": "dog, small", "count": 6, "correct": 4, "predicted": 5, "recall": 4 / 6, "precision": 0.8}
        | {"f1": 8 / 11},
        {"class": "fox", "count": 0, "correct": 0, "predicted": 1, "recall": None, "precision": 0.0, "f1": None},
    ]
    assert found["ema"]["classes_with_samples"] == 2
    empty = {"from": 0.0, "to": 1 / 15, "count": 0, "correct": 0, "accuracy": None, "confidence": None}
    assert found["ema"]["calibration"][0] == empty
    full = found["ema"]["calibration"][8]
    assert (full["count"], full["correct"], full["accuracy"], full["confidence"]) == (5, 2, 0.4, 0.6)
    for name in ("confusion.csv", "confusion_ema.csv"):
        rows = list(csv.reader((tmp_path / name).read_text(encoding="utf-8").splitlines()))
        assert rows[0] == ["class \\ answer", *NAMES]
        assert rows[1:] == [[name, *map(str, row)] for name, row in zip(NAMES, CONFUSION, strict=True)]


def test_names_that_are_no_text_are_written_as_they_can_be(details: Details, tmp_path: Path) -> None:
    names = [os.fsdecode(b"\xff"), "two\nlines", 'a "b"']
    write_details(tmp_path, {"raw": details}, names, FACTS)
    header, *rows = csv.reader((tmp_path / "confusion.csv").read_text(encoding="utf-8").splitlines())
    assert header[1:] == [row[0] for row in rows] == ["\\udcff", "two\\nlines", 'a "b"']
    rows = json.loads((tmp_path / "evaluation.json").read_text())["raw"]["classes"]
    assert [row["class"] for row in rows] == names


def test_the_console_stays_short_whatever_the_number_of_classes(details: Details) -> None:
    # Class k is found in k of 1000 samples: the five worst are 0 to 4. The last is always found.
    right = torch.arange(1001)
    many = replace(details, samples=torch.full((1001,), 1000), answers=right, right=right, confusion=None)
    lines = many.describe([f"class {number} " + "x" * 99 for number in range(1001)], "")
    assert len(lines) == 2
    assert [part.split(" ")[1] for part in lines[1].removeprefix("least found: ").split("; ")] == list("01234")
    assert max(map(len, lines)) < 400


def test_where_every_class_is_always_found_none_is_named(details: Details) -> None:
    perfect = replace(details, samples=torch.tensor([4, 6, 2]), right=torch.tensor([4, 6, 2]))
    assert perfect.describe(NAMES, "") == ["classes: balanced accuracy 100.00 %  ECE 0.1500"]


def test_no_table_of_too_many_classes_is_told(
    details: Details, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_CLASSES", 2)
    lines = write_details(tmp_path, {"raw": replace(details, confusion=None)}, NAMES, FACTS)
    assert lines[-1] == "no confusion.csv: 3 classes are more than 2"
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.json"]


def test_a_confidence_on_an_edge_is_in_the_bin_below() -> None:
    # Guo et al.: bin m is ((m-1)/15, m/15]. 3/15 and 1 are edges; what lies just above 3/15 is one bin further.
    values = [0.2, math.nextafter(0.2, 1), 1.0, 1 / 15, 1e-9]
    counts, sums = in_bins(torch.tensor(values, dtype=torch.float64), torch.tensor([True, False, True, True, False]))
    assert {number: count for number, count in enumerate(counts[0].tolist()) if count} == {0: 2, 2: 1, 3: 1, 14: 1}
    assert {number: count for number, count in enumerate(counts[1].tolist()) if count} == {0: 1, 2: 1, 14: 1}
    assert sums[0].item() == pytest.approx(1 / 15 + 1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_confidence_that_is_no_number_is_in_no_bin_and_told(details: Details, tmp_path: Path, bad: float) -> None:
    counts, sums = in_bins(torch.tensor([bad, 0.5]), torch.tensor([True, True]))
    assert counts[:, BINS].tolist() == [1, 1]
    assert counts[0].sum() == 2
    assert sums.tolist() == [0.5 if number == 7 else 0.0 for number in range(BINS + 1)]
    unknown = replace(details, calibration=replace(details.calibration, unknown=1))
    first, _ = write_details(tmp_path, {"raw": unknown}, NAMES, FACTS)
    assert first.endswith("ECE unknown, 1 answers are not finite")
    content = (tmp_path / "evaluation.json").read_text()
    assert "NaN" not in content
    assert (json.loads(content)["raw"]["ece"], json.loads(content)["raw"]["confidence_unknown"]) == (None, 1)


def test_confidence_is_the_probability_that_the_loss_gives_an_answer() -> None:
    logits = torch.tensor([[math.log(3.0), 0.0, 0.0]])
    best = torch.tensor([0])
    assert confidence_of(logits, best, as_yes_or_no=False).tolist() == pytest.approx([3 / 5])
    assert confidence_of(logits, best, as_yes_or_no=True).tolist() == pytest.approx([3 / 4])
    log_probabilities = torch.tensor([[0.7, 0.2, 0.1]]).log()
    assert confidence_of(log_probabilities, best, as_yes_or_no=False).tolist() == pytest.approx([0.7])
