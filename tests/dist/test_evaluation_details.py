"""Each class, who is taken for whom and calibration: the same digits on any number of processes."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist import toys
from tests.dist.harness import finished, in_ranks, tiny_config
from tests.dist.test_evaluation import LABELS, evaluator, images_of
from trainer.optim import averaged_tensors
from trainer.runtime import RunContext

ANSWERED = [0, 0, 1, 1, 3, 2, 0]
"""What toys.ByBrightness says of bright() of them."""


def bright(answers: list[int]) -> Tensor:
    """An image for each, that toys.ByBrightness takes for that class."""
    return torch.tensor(answers, dtype=torch.uint8).mul(64).view(-1, 1, 1, 1).expand(-1, 1, 8, 8).contiguous()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_classes_and_calibration_do_not_depend_on_the_number_of_processes(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(max_epochs=1, ema__half_life_samples=20.0, eval__batch_size=4, dtype="float64")
    finished(tmp_path / "run", config, 1)
    trained = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    attempt = finished(tmp_path / "run", config, world_size, mode="eval", checkpoint="last")
    again = json.loads((attempt.attempt.path / "evaluation.json").read_text())
    assert again == trained
    assert {"ema", "raw"} < again.keys()
    assert (again["checkpoint"], again["samples"], again["flip"]) == ("step_00000008", 23, False)
    assert (again["data"], again["changed_settings"]) == ("tests.dist.toys:images", [])
    assert sum(each["count"] for each in again["raw"]["classes"]) == 23
    metrics = json.loads((attempt.attempt.path / "eval.json").read_text())["metrics"]
    hits = sum(each["count"] * each["recall"] for each in again["raw"]["classes"] if each["count"])
    assert hits / 23 == pytest.approx(metrics["eval/top1"])


def count_in_detail(context: RunContext) -> dict[tuple[int, int, str], Any]:
    model = toys.ByBrightness().eval()
    found = {}
    for size, batch, mode in itertools.product((1, 2, 5, 7), (1, 2, 100), ("sharded", "rank0")):
        images, labels = bright(ANSWERED[:size]), LABELS[:size]
        result = evaluator(model, images, labels, batch, mode, classes=4).evaluate(
            context, averaged_tensors(model), in_detail=True
        )
        assert result is not None
        assert result.details is not None
        details = result.details
        assert details.confusion is not None
        names = ["a", "b", "c", "d"]
        found[size, batch, mode] = (details.confusion.tolist(), details.as_json(names), result.top1)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_classes_are_counted_once_on_any_number_of_processes(tmp_path: Path, world_size: int) -> None:
    # Also with more ranks than samples and with one sample; LABELS are 0 0 0 1 1 2 3.
    for found in in_ranks(tmp_path, world_size, count_in_detail):
        for (size, _, _), (confusion, content, top1) in found.items():
            pairs = list(zip(LABELS[:size], ANSWERED[:size], strict=True))
            assert confusion == [[pairs.count((label, best)) for best in range(4)] for label in range(4)]
            hits = [sum(a == b == label for a, b in pairs) for label in range(4)]
            counts = [LABELS[:size].count(label) for label in range(4)]
            recall = [hit / count if count else None for hit, count in zip(hits, counts, strict=True)]
            assert [row["recall"] for row in content["classes"]] == recall
            known = [value for value in recall if value is not None]
            assert content["balanced_accuracy"] == sum(known) / len(known)
            assert top1 == sum(hits) / size
            # The logits are 3 for the answer and 0 for three others.
            confidence = math.e**3 / (math.e**3 + 3)
            assert content["ece"] == pytest.approx(abs(confidence - top1))
            (row,) = (row for row in content["calibration"] if row["count"])
            assert row["from"] < confidence <= row["to"]
            assert (row["count"], row["correct"]) == (size, sum(hits))
        for size, batch, mode in found:
            assert found[size, batch, mode] == found[size, batch, "sharded"], mode


def test_right_answers_are_the_same_in_top1_and_in_the_bins(tmp_path: Path) -> None:
    # All logits are equal: which class a tie is given to is torch's choice, and it is asked once.
    def score(context: RunContext) -> tuple[float, int, int]:
        model = toys.AllEqual(300).eval()
        labels = list(range(300))
        result = evaluator(model, images_of(300), labels, 100, "sharded", classes=300).evaluate(
            context, averaged_tensors(model), in_detail=True
        )
        assert result is not None
        assert result.details is not None
        details = result.details
        return result.top1, int(details.right.sum()), int(details.calibration.right.sum())

    for top1, right, right_in_bins in in_ranks(tmp_path, 2, score):
        assert right == right_in_bins == round(300 * top1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_answers_that_are_no_numbers_are_told_and_leave_json_readable(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(model={"name": "tests.dist.toys:NotFiniteInEvaluation"}, max_epochs=1)
    attempt = finished(tmp_path, config, world_size)
    assert "ECE unknown, 23 answers are not finite" in attempt.log()
    for path in (tmp_path / "evaluation.json", attempt.run_dir.result):
        assert "NaN" not in path.read_text()
    attempt = finished(tmp_path, config, world_size, mode="eval", checkpoint="last")
    answer = json.loads((attempt.attempt.path / "eval.json").read_text(), parse_constant=pytest.fail)
    assert answer["metrics"]["eval/ece"] is None


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_class_is_always_right(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(data={"name": "tests.dist.toys:one_class", "num_classes": 1}, max_epochs=1)
    finished(tmp_path, config, world_size)
    found = json.loads((tmp_path / "evaluation.json").read_text())["raw"]
    assert (found["balanced_accuracy"], found["ece"], found["classes"][0]["count"]) == (1.0, 0.0, 4)
    assert (tmp_path / "confusion.csv").read_text() == "class \\ answer,only\nonly,4\n"


def test_scalars_are_in_the_result_and_in_tensorboard_once_at_the_end(tmp_path: Path) -> None:
    config = tiny_config(max_epochs=2, ema__half_life_samples=20.0)
    attempt = finished(tmp_path, config)
    written = json.loads((tmp_path / "evaluation.json").read_text())
    for prefix, weights in (("", "raw"), ("ema_", "ema")):
        for name in ("balanced_accuracy", "ece"):
            value = attempt.result()["metrics"][f"eval/{prefix}{name}"]
            assert value == written[weights][name]
            assert attempt.events(f"eval/{prefix}{name}") == [(16, pytest.approx(value))]
            assert attempt.metric(f"eval/{prefix}{name}") == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_can_be_ended_by_its_balanced_accuracy(tmp_path: Path, world_size: int) -> None:
    # Always class 0: recall 1, 0, 0, 0, and so it stays.
    stopping = {"patience": 2, "metric": "eval/balanced_accuracy"}
    config = tiny_config(model={"name": "tests.dist.toys:AlwaysZero"}, early_stopping=stopping, max_epochs=9)
    attempt = finished(tmp_path, config, world_size)
    assert attempt.metric("eval/balanced_accuracy") == [(8, 0.25), (16, 0.25), (24, 0.25)]
    assert "eval/balanced_accuracy was no better than 0.2500 in 2 evaluations" in attempt.log()
    assert attempt.result()["stopped_early"]
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert (found["checkpoint"], found["raw"]["balanced_accuracy"]) == ("step_00000024", 0.25)
