"""Losses, summed over samples: the caller divides by the count that is right for it."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from configs.sections import LossConfig


def cross_entropy_sum(config: LossConfig, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=config.label_smoothing)


def nll_sum(_config: LossConfig, log_probabilities: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(log_probabilities, labels, reduction="sum")


LOSSES: dict[str, Callable[[LossConfig, Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy_sum,
    "nll": nll_sum,
}
