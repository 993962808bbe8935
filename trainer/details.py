"""What an evaluation says beyond its means: how each class fares, who is taken for whom, and how far confidence can be
trusted. From counts, which are whole numbers: the same on any number of processes."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.contract import write_atomically
from configs.text import printable
from trainer.calibration import DEFINITION, Calibration
from trainer.disk import in_one_sentence
from trainer.runtime import RunContext
from trainer.tracking import as_json

MOST_CLASSES = 2000
"""With more, no table of who is taken for whom is made: every rank would hold a number for each pair, 32 MB and up."""
SCALARS = ("balanced_accuracy", "ece")
"""The names of what Details.metrics() gives."""
_WORST = 5
_LONGEST_NAME = 40


@dataclass(frozen=True)
class Details:
    """Of each class, int64 (C,): its samples, the answers that named it, and those of them that are right. `confusion`
    int64 (C, C): row = class, column = answer; None where there are more than MOST_CLASSES."""

    samples: Tensor
    answers: Tensor
    right: Tensor
    confusion: Tensor | None
    calibration: Calibration

    def recall(self) -> list[float | None]:
        """Of each class: the share of its samples that is found; None where there is no sample."""
        return _shares(self.right, self.samples)

    def precision(self) -> list[float | None]:
        """Of each class: the share of the answers naming it that is right; None where there is none."""
        return _shares(self.right, self.answers)

    def f1(self) -> list[float | None]:
        """Of each class: the harmonic mean of recall and precision, 0 where nothing is right; None without a sample."""
        values = _shares(2 * self.right, self.samples + self.answers)
        return [value if count else None for value, count in zip(values, self.samples.tolist(), strict=True)]

    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that have samples."""
        found = [value for value in self.recall() if value is not None]
        return sum(found) / len(found)

    def metrics(self) -> dict[str, float]:
        return {"balanced_accuracy": self.balanced_accuracy(), "ece": self.calibration.error()}

    def as_json(self, classes: Sequence[str]) -> dict[str, Any]:
        counts = (self.samples.tolist(), self.right.tolist(), self.answers.tolist())
        rows = zip(classes, *counts, self.recall(), self.precision(), self.f1(), strict=True)
        names = ("class", "count", "correct", "predicted", "recall", "precision", "f1")
        return as_json(self.metrics()) | {
            "classes_with_samples": int(self.samples.count_nonzero()),
            "classes": [dict(zip(names, row, strict=True)) for row in rows],
            "confidence_unknown": self.calibration.unknown,
            "calibration": self.calibration.as_json(),
        }

    def as_csv(self, classes: Sequence[str]) -> str:
        """The confusion matrix with names: a line for each class, a column for each answer."""
        assert self.confusion is not None
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = [printable(name) for name in classes]  # a folder's name may be no UTF-8
        writer.writerow(["class \\ answer", *names])
        writer.writerows([name, *row.tolist()] for name, row in zip(names, self.confusion, strict=True))
        return text.getvalue()

    def describe(self, classes: Sequence[str], of: str) -> list[str]:
        """Console lines: the scalars, and the classes that are found least."""
        there, unknown = int(self.samples.count_nonzero()), self.calibration.unknown
        some = "" if there == len(classes) else f" of the {there} of {len(classes)} classes that have samples"
        error = f"{self.calibration.error():.4f}" if not unknown else f"unknown, {unknown} answers are not finite"
        of = f" {of}" if of else ""
        lines = [f"classes{of}: balanced accuracy {100 * self.balanced_accuracy():.2f} %{some}  ECE {error}"]
        rows = zip(self.recall(), range(len(classes)), self.samples.tolist(), strict=True)
        worst = sorted((value, number, count) for value, number, count in rows if value is not None and value < 1)
        if worst:
            shown = (f"{_short(classes[number])} {100 * v:.2f} % of {count}" for v, number, count in worst[:_WORST])
            lines.append(f"least found{of}: {'; '.join(shown)}")
        return lines


def _shares(parts: Tensor, wholes: Tensor) -> list[float | None]:
    return [part / whole if whole else None for part, whole in zip(parts.tolist(), wholes.tolist(), strict=True)]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def count_classes(
    answers: list[tuple[Tensor, Tensor]], num_classes: int, context: RunContext
) -> tuple[Tensor, Tensor | None]:
    """Of this rank's batches of best_classes() and labels, summed over all ranks, on the CPU: int64 (3, C), the samples
    of each class, the answers that named it and the right ones; and the confusion matrix of Details. Collective."""
    none = torch.zeros(0, dtype=torch.int64, device=context.device)
    best, labels = (torch.cat([none, *parts]) for parts in (zip(*answers, strict=True) if answers else ((), ())))
    counts = [torch.bincount(of, minlength=num_classes) for of in (labels, best, labels[labels == best])]
    table = None
    if num_classes <= MOST_CLASSES:
        pairs = torch.bincount(labels * num_classes + best, minlength=num_classes**2)
        table = context.all_reduce_sum(pairs).view(num_classes, num_classes).cpu()
    return context.all_reduce_sum(torch.stack(counts)).cpu(), table


def write_details(
    folder: Path, found: Mapping[str, Details], classes: Sequence[str], facts: Mapping[str, Any]
) -> list[str]:
    """Write evaluation.json, with `facts` of what was evaluated, and confusion.csv into `folder`, by `raw` or `ema`
    weights; returns the console's lines."""
    lines = list[str]()
    content = dict(facts) | {"definition_of_ece": DEFINITION}
    with in_one_sentence("write", folder / "evaluation.json"):
        for weights, details in found.items():
            content[weights] = details.as_json(classes)
            lines += details.describe(classes, "" if weights == "raw" else "EMA")
            if details.confusion is not None:
                name = "confusion.csv" if weights == "raw" else f"confusion_{weights}.csv"
                write_atomically(folder / name, details.as_csv(classes))
        write_atomically(folder / "evaluation.json", json.dumps(content, indent=1))
    if len(classes) > MOST_CLASSES:
        lines.append(f"no confusion.csv: {len(classes)} classes are more than {MOST_CLASSES}")
    return lines
