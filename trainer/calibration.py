"""How far the confidence of answers can be trusted, in bins. Counts are whole numbers, and confidences are summed in
one fixed order, so that nothing depends on the number of processes."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.runtime import RunContext

BINS = 15
DEFINITION = (
    "expected calibration error, https://arxiv.org/abs/1706.04599: the sum over 15 bins of equal width, (0, 1/15] to "
    "(14/15, 1], of the bin's share of the samples times the distance of its accuracy from its mean confidence"
)


@dataclass(frozen=True)
class Calibration:
    """Of each bin (BINS,): how many answers (int64), how many of them right (int64), the sum of their confidences
    (float64). `unknown` answers have a confidence that is no number, and are in no bin."""

    answers: Tensor
    right: Tensor
    confidence: Tensor
    unknown: int = 0

    def error(self) -> float:
        """See DEFINITION; NaN where a confidence is unknown."""
        if self.unknown:
            return float("nan")
        return float((self.confidence - self.right.double()).abs().sum()) / int(self.answers.sum())

    def as_json(self) -> list[dict[str, Any]]:
        """A row for each bin; accuracy and mean confidence are null where it is empty."""
        bins = zip(self.answers.tolist(), self.right.tolist(), self.confidence.tolist(), strict=True)
        return [
            {
                "from": number / BINS,
                "to": (number + 1) / BINS,
                "count": count,
                "correct": right,
                "accuracy": right / count if count else None,
                "confidence": total / count if count else None,
            }
            for number, (count, right, total) in enumerate(bins)
        ]


class BinSums:
    """The bins of an evaluation while it goes on; one slot a batch, as for the losses."""

    def __init__(self, num_batches: int, context: RunContext) -> None:
        self._context = context
        # The last bin is for what is no number.
        self._counts = torch.zeros(2, BINS + 1, dtype=torch.int64, device=context.device)
        self._confidence = torch.zeros(num_batches, BINS + 1, dtype=context.widest_dtype, device=context.device)

    def add(self, batch: int, confidence: Tensor, is_right: Tensor) -> None:
        """Of batch number `batch`: confidences and bool (N,)."""
        counts, self._confidence[batch] = in_bins(confidence.to(self._confidence.dtype), is_right)
        self._counts += counts

    def total(self) -> Calibration:
        """Over all ranks. Collective."""
        for tensor in (self._counts, self._confidence):
            self._context.all_reduce_sum(tensor)
        answers, right = self._counts.cpu()
        sums = self._confidence.cpu().double().sum(0)
        return Calibration(answers[:BINS], right[:BINS], sums[:BINS], int(answers[BINS]))


def in_bins(confidence: Tensor, is_right: Tensor) -> tuple[Tensor, Tensor]:
    """Of confidences and bool (N,): counts int64 (2, BINS + 1), of all and of the right ones, and the sums of
    confidence (BINS + 1,), the last bin for what is no number."""
    is_known = confidence.isfinite()
    edges = torch.arange(1, BINS, dtype=confidence.dtype, device=confidence.device) / BINS
    numbers = torch.where(is_known, torch.bucketize(confidence, edges), BINS)  # an edge is in the bin below it
    # No index_add_: on a GPU it sums in any order.
    members = F.one_hot(numbers, BINS + 1)
    counts = torch.stack([members.sum(0), (members * is_right[:, None]).sum(0)])
    return counts, (members * torch.where(is_known, confidence, 0.0)[:, None]).sum(0)


def confidence_of(logits: Tensor, best: Tensor, *, as_yes_or_no: bool) -> Tensor:
    """Of logits (N, C) and the answers (N,): the probability that the network gives each, (N,). `as_yes_or_no`: classes
    do not share it, each has a probability of its own (loss.name: bce)."""
    logits = logits.double() if logits.device.type != "mps" else logits
    probabilities = logits.sigmoid() if as_yes_or_no else logits.softmax(1)
    return probabilities.gather(1, best[:, None]).squeeze(1)
