"""Losses, summed over samples: the caller divides by the count that is right for it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.errors import ConfigError
from configs.loss_section import LossConfig

LossSum = Callable[[Tensor, Tensor], Tensor]
"""Of logits (B, C) and targets, int64 classes (B,) or floating shares (B, C): a scalar."""


def cross_entropy_sum(config: LossConfig, weight: Tensor | None, logits: Tensor, targets: Tensor) -> Tensor:
    smoothing = config.label_smoothing
    return F.cross_entropy(logits, targets, weight=weight, reduction="sum", label_smoothing=smoothing)


def nll_sum(_config: LossConfig, weight: Tensor | None, log_probabilities: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        weighted = log_probabilities if weight is None else log_probabilities * weight
        return -(targets * weighted).sum()
    return F.nll_loss(log_probabilities, targets, weight=weight, reduction="sum")


def bce_sum(config: LossConfig, weight: Tensor | None, logits: Tensor, targets: Tensor) -> Tensor:
    """Each class a yes or no of its own: the mean over the classes, or their sum (Wightman et al.,
    https://arxiv.org/abs/2110.00476, whose targets are those above bce_target_threshold)."""
    classes = logits.shape[1]
    shares = targets if targets.is_floating_point() else F.one_hot(targets, classes)
    shares = shares.to(logits.dtype)
    per_sample = None if weight is None else (shares @ weight.to(logits.dtype)).unsqueeze(1)
    shares = shares * (1 - config.label_smoothing) + config.label_smoothing / classes
    if config.bce_target_threshold is not None:
        shares = (shares > config.bce_target_threshold).to(logits.dtype)
    total = F.binary_cross_entropy_with_logits(logits, shares, weight=per_sample, reduction="sum")
    return total if config.bce_sum else total / classes


LOSSES: dict[str, Callable[[LossConfig, Tensor | None, Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy_sum,
    "nll": nll_sum,
    "bce": bce_sum,
}


def class_weights(config: LossConfig, num_classes: int, labels: Tensor | None) -> Tensor | None:
    """float32 (classes,). `balanced` makes every class count the same: samples / (classes x samples of the class). That
    is 1 on average over the samples, so that the learning rate means what it did.

    `labels` are those of the training split, if they are known without reading it. Raises ConfigError where the weights
    do not fit, or a class has no sample to be weighed.
    """
    if config.class_weights is None:
        return None
    if config.class_weights != "balanced":
        if len(config.class_weights) != num_classes:
            raise ConfigError(f"loss.class_weights has {len(config.class_weights)} numbers for {num_classes} classes")
        return torch.tensor(config.class_weights)
    if labels is None:
        raise ConfigError("loss.class_weights: balanced needs labels that are known beforehand; give a list of numbers")
    counts = torch.bincount(labels, minlength=num_classes)
    if not counts.all():
        raise ConfigError(f"loss.class_weights: balanced, and class {int(counts.argmin())} has no sample to train on")
    return (len(labels) / (num_classes * counts.double())).float()
