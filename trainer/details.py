"""What an evaluation says beyond its means: each class, who is taken for whom, and how far confidence can be trusted.

All from counts, which are whole numbers, and from sums of confidence that are taken in one fixed order: the same on any
number of processes.
"""

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

MOST_CLASSES = 5000
"""With more the table of who is taken for whom, a number for each pair, would be larger than 200 MB."""
BINS = 15
_SHOWN = 3


@dataclass(frozen=True)
class Details:
    """`confusion` int64 (C, C): row = class, column = answer. By bins of confidence, each (BINS,): how many answers
    (int64), how many of them right (int64), the sum of their confidences (float64)."""

    confusion: Tensor
    answers: Tensor
    right: Tensor
    confidence: Tensor

    def recall(self) -> list[float | None]:
        """Of each class: the share of its samples that is found; None where there is no sample."""
        return _shares(self.confusion.diagonal(), self.confusion.sum(1))

    def precision(self) -> list[float | None]:
        """Of each answer: the share that is right; None where it was never given."""
        return _shares(self.confusion.diagonal(), self.confusion.sum(0))

    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that have samples."""
        found = [value for value in self.recall() if value is not None]
        return sum(found) / len(found)

    def calibration_error(self) -> float:
        """Expected calibration error with 15 bins of equal width: the mean distance of confidence (the largest softmax
        output) from accuracy, weighted by the samples in each bin (Guo et al., https://arxiv.org/abs/1706.04599)."""
        gaps = (self.confidence - self.right.double()).abs()
        return float(gaps.sum()) / int(self.answers.sum())

    def as_json(self, classes: Sequence[str]) -> dict[str, Any]:
        counts, recall, precision = self.confusion.sum(1).tolist(), self.recall(), self.precision()
        rows = zip(classes, counts, recall, precision, strict=True)
        bins = zip(self.answers.tolist(), self.right.tolist(), self.confidence.tolist(), strict=True)
        return {
            "balanced_accuracy": self.balanced_accuracy(),
            "calibration_error": self.calibration_error(),
            "classes": [
                {"class": name, "count": count, "recall": found, "precision": right, "f1": _f1(found, right)}
                for name, count, found, right in rows
            ],
            "calibration": [
                {"from": number / BINS, "to": (number + 1) / BINS, "count": count}
                | ({"accuracy": hits / count, "confidence": total / count} if count else {})
                for number, (count, hits, total) in enumerate(bins)
            ],
        }

    def as_csv(self, classes: Sequence[str]) -> str:
        """The confusion matrix with names: a line for each class, a column for each answer."""
        names = [name.encode("utf-8", "backslashreplace").decode() for name in classes]  # of folders: any bytes
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["class \\ answer", *names])
        writer.writerows([name, *row] for name, row in zip(names, self.confusion.tolist(), strict=True))
        return text.getvalue()

    def describe(self, classes: Sequence[str], of: str) -> str:
        """One console line."""
        known = [(value, name) for value, name in zip(self.recall(), classes, strict=True) if value is not None]
        worst = ", ".join(f"{name} {100 * value:.1f} %" for value, name in sorted(known)[:_SHOWN])
        of = f" {of}" if of else ""
        return (
            f"classes{of}: balanced accuracy {100 * self.balanced_accuracy():.2f} %  calibration error "
            f"{self.calibration_error():.4f}  least found: {worst}"
        )


def _shares(parts: Tensor, wholes: Tensor) -> list[float | None]:
    return [part / whole if whole else None for part, whole in zip(parts.tolist(), wholes.tolist(), strict=True)]


def _f1(recall: float | None, precision: float | None) -> float | None:
    """The harmonic mean; None where the class has no sample."""
    if recall is None:
        return None
    return 2 * recall * precision / (recall + precision) if precision and recall else 0.0


def confusion_of(best: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Of answers and labels (N,): int64 (C, C)."""
    return torch.bincount(labels * num_classes + best, minlength=num_classes**2).view(num_classes, num_classes)


def confidence_in_bins(logits: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of a batch's logits (N, C): counts int64 (2, BINS), all answers and the right ones, and the sums of confidence in
    `dtype` (BINS,); bins are (0, 1/15], (1/15, 2/15], ..."""
    confidence, answers = logits.to(dtype).softmax(1).max(1)
    numbers = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    right = numbers[answers == labels]
    counts = torch.stack([torch.bincount(of, minlength=BINS) for of in (numbers, right)])
    return counts, torch.zeros(BINS, dtype=dtype, device=logits.device).index_add_(0, numbers, confidence)


def write_details(folder: Path, found: Mapping[str, Details], classes: Sequence[str]) -> list[str]:
    """Write evaluation.json and confusion.csv into `folder`, by `raw` or `ema` weights; returns the console's lines."""
    if not found:
        return []
    content = {weights: details.as_json(classes) for weights, details in found.items()}
    write_atomically(folder / "evaluation.json", json.dumps(content, indent=1))
    for weights, details in found.items():
        name = "confusion.csv" if weights == "raw" else f"confusion_{weights}.csv"
        write_atomically(folder / name, details.as_csv(classes))
    return [details.describe(classes, "" if weights == "raw" else "EMA") for weights, details in found.items()]
