"""Exact evaluation: each sample of the split once, whatever the number of processes, and the count is checked."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError, TrainingError
from configs.sections import EvalConfig
from trainer.calibration import BinSums, confidence_of
from trainer.data.augment import Preprocess
from trainer.data.source import Source
from trainer.details import Details, count_classes
from trainer.memory import told_if_out_of_memory
from trainer.optim import averaged_tensors
from trainer.runtime import RunContext
from trainer.stop import StopFlag

EVALUATED = -1
"""In place of the part of a training batch where random numbers are keyed."""


@dataclass(frozen=True)
class EvalResult:
    """Fractions in [0, 1]; `loss` is the mean over `count` samples;
    `top5` only where there are more than five classes."""

    loss: float
    top1: float
    top5: float | None
    count: int
    details: Details | None = None
    views: str = ""
    """What else was scored of each image."""

    def metrics(self, prefix: str, *, in_detail: bool = False) -> dict[str, float]:
        values = {"loss": self.loss, "top1": self.top1} | ({} if self.top5 is None else {"top5": self.top5})
        if in_detail and self.details is not None:
            values |= self.details.metrics()
        return {f"eval/{prefix}{name}": value for name, value in values.items()}

    def describe(self, of: str) -> str:
        """One console line, in percent; `of` says which weights."""
        top5 = "" if self.top5 is None else f"  top-5 {100 * self.top5:.2f} %"
        of = (f" {of}" if of else "") + (f" with {self.views}" if self.views else "")
        return f"evaluated {self.count}/{self.count}{of}: top-1 {100 * self.top1:.2f} %{top5}  loss {self.loss:.4f}"


def details_of(results: Mapping[str, EvalResult]) -> dict[str, Details]:
    """By `raw` or `ema`, of the results by the prefix of their metrics."""
    named = ((prefix.rstrip("_") or "raw", result.details) for prefix, result in results.items())
    return {name: details for name, details in named if details is not None}


@dataclass(frozen=True)
class _Seen:
    """What a rank has evaluated so far."""

    losses: Tensor
    """One slot a batch of the split: each is filled by one rank, the rest adds exact zeros, and the sum is taken in one
    fixed order."""
    bins: BinSums | None
    answers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of each batch: best_classes() and labels."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates on `model`, a copy of the trained network:
    statistics are averaged over the ranks without touching theirs."""

    model: nn.Module
    trained: nn.Module
    source: Source
    preprocess: Preprocess
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    config: EvalConfig
    num_classes: int
    channels_last: bool
    has_own_statistics: bool = True
    """Whether running statistics differ between ranks, so that their mean is what is evaluated."""
    loss_name: str = "cross_entropy"
    """What the network's outputs are follows from it, as configs.loss_section.LossConfig says."""
    seed: int | None = None
    """Keys what the network draws in evaluation too, by the batch; None: it draws nothing."""

    def evaluate(
        self,
        context: RunContext,
        weights: dict[str, Tensor],
        stop: StopFlag | None = None,
        alive: Callable[[], None] = lambda: None,
        *,
        in_detail: bool = False,
    ) -> EvalResult | None:
        """Evaluate `weights` (averaged_tensors of this rank's network, or of its EMA). Called by all ranks.

        With `stop` the ranks agree between turns whether to go on; None is returned if not. `alive` is called in each.
        `in_detail`: with EvalResult.details.
        """
        load_averaged(self.model, weights, context, averages=self.has_own_statistics)
        copy_other_buffers(self.trained, self.model, context)
        batches = self._batches()
        mine = self._share_of(context, len(batches))
        losses = torch.zeros(len(batches), dtype=context.widest_dtype, device=context.device)
        seen = _Seen(losses, BinSums(len(batches), context) if in_detail else None)
        loaded = self.source.evaluation([batches[i] for i in mine])
        fix = f"use an eval.batch_size below {self.config.batch_size}"
        with told_if_out_of_memory("in evaluation", fix), torch.inference_mode():
            for turn in range(self._num_turns(context, len(batches))):
                alive()
                if turn < len(mine):
                    self._see(seen, context, mine[turn], *next(loaded))
                if stop is not None and context.any_rank(stop.is_set):
                    return None
        return self._result(seen, context)

    def _see(self, seen: _Seen, context: RunContext, batch: int, images: Tensor, labels: Tensor) -> None:
        if self.seed is not None:
            context.seed_dropout(self.seed, batch, EVALUATED, 0)
        logits = self._logits(context, images)
        seen.losses[batch] = self.loss_sum(logits, labels)
        best = best_classes(logits, min(5, self.num_classes))
        seen.answers.append((best, labels))
        if seen.bins is not None:
            confidence = confidence_of(logits, best[:, 0], as_yes_or_no=self.loss_name == "bce")
            seen.bins.add(batch, confidence, best[:, 0] == labels)

    def _result(self, seen: _Seen, context: RunContext) -> EvalResult:
        losses = context.all_reduce_sum(seen.losses)
        counts = count_by_place(seen.answers, min(5, self.num_classes), context.device)
        *by_place, count = context.all_reduce_sum(counts).tolist()
        if count != len(self.source):
            raise TrainingError(
                f"evaluated {count} of {len(self.source)} samples; the ranks do not see the same data set"
            )
        loss = float(losses.cpu().double().sum()) / count
        top5 = sum(by_place) / count if self.num_classes > 5 else None
        details = None if seen.bins is None else self._details(context, seen.answers, seen.bins)
        return EvalResult(loss, by_place[0] / count, top5, count, details, self._views())

    def _views(self) -> str:
        return " and ".join(name for name, on in (("flips", self.config.flip), ("shifts", self.config.shift)) if on)

    def _details(self, context: RunContext, answers: list[tuple[Tensor, Tensor]], bins: BinSums) -> Details:
        first = [(best[:, 0], labels) for best, labels in answers]
        (samples, named, right), confusion = count_classes(first, self.num_classes, context)
        return Details(samples, named, right, confusion, bins.total())

    def _num_turns(self, context: RunContext, num_batches: int) -> int:
        """Batches of the rank that has the most: all ranks take as many turns."""
        return num_batches if self.config.mode == "rank0" else -(-num_batches // context.world_size)

    def _batches(self) -> list[range]:
        size, total = self.config.batch_size, len(self.source)
        return [range(start, min(start + size, total)) for start in range(0, total, size)]

    def _share_of(self, context: RunContext, num_batches: int) -> list[int]:
        if self.config.mode == "rank0":
            return list(range(num_batches)) if context.is_rank_zero else []
        return list(range(context.rank, num_batches, context.world_size))

    def _logits(self, context: RunContext, images: Tensor) -> Tensor:
        """(N, classes), in float32 or float64; with eval.flip the mean over each image and its mirror image, with
        eval.shift half of that and half of the same of the image moved along the diagonal."""
        images = self.preprocess.normalise(images)
        logits = self._both_ways(context, images)
        if reach := self.config.shift:
            if reach >= min(images.shape[2:]):
                raise ConfigError(f"eval.shift is {reach} and the images have {min(images.shape[2:])} pixels; use less")
            padded = F.pad(images, (reach,) * 4, "reflect")
            height, width = images.shape[2:]
            up, down = padded[:, :, 2 * reach :, 2 * reach :], padded[:, :, :height, :width]
            logits = logits / 2 + (self._both_ways(context, up) + self._both_ways(context, down)) / 4
        # The mean of log-probabilities is none: their exponents no longer add up to 1.
        return logits.log_softmax(1) if self.loss_name == "nll" and (reach or self.config.flip) else logits

    def _both_ways(self, context: RunContext, images: Tensor) -> Tensor:
        logits = self._forward(context, images)
        return (logits + self._forward(context, images.flip(3))) / 2 if self.config.flip else logits

    def _forward(self, context: RunContext, images: Tensor) -> Tensor:
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with context.autocast():
            logits: Tensor = self.model(images)
        return logits if logits.dtype == torch.float64 else logits.float()


def best_classes(logits: Tensor, places: int) -> Tensor:
    """Of logits (N, classes): int64 of shape (N, places)."""
    return logits.topk(places, dim=1).indices


def count_by_place(answers: list[tuple[Tensor, Tensor]], places: int, device: torch.device) -> Tensor:
    """Of batches of best_classes() and labels: how many samples have their class in first place, in second, ..., and
    how many there are; int64 of shape (places + 1,). Done once at the end, not for each batch."""
    if not answers:
        return torch.zeros(places + 1, dtype=torch.int64, device=device)
    best, labels = (torch.cat(parts) for parts in zip(*answers, strict=True))
    hits = best == labels[:, None]
    return torch.cat([hits.sum(0), hits.new_full((1,), len(hits), dtype=torch.int64)])


@torch.no_grad()
def load_averaged(model: nn.Module, weights: dict[str, Tensor], context: RunContext, *, averages: bool = True) -> None:
    """Copy `weights` into `model`; parameters are equal on all ranks, and floating buffers are averaged over them if
    they differ. The mean of equal values may be off by a bit."""
    parameters = dict(model.named_parameters())
    for name, target in averaged_tensors(model).items():
        target.copy_(weights[name])
        if averages and name not in parameters and context.world_size > 1:
            context.all_reduce_sum(target).div_(context.world_size)


@torch.no_grad()
def copy_other_buffers(trained: nn.Module, model: nn.Module, context: RunContext) -> None:
    """Copy what is not averaged (counters, flags, buffers outside the state) into `model`: rank 0's, on all ranks."""
    averaged = averaged_tensors(model)
    values = {name: buffer.detach().cpu() for name, buffer in trained.named_buffers() if name not in averaged}
    targets = dict(model.named_buffers())
    for name, value in zip(values, context.of_rank(0, list(values.values())), strict=True):
        targets[name].copy_(value)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`model` in evaluation mode inside: no dropout, and no BatchNorm buffer is touched."""
    was_training = model.training
    stay = [module for module in model.modules() if not module.training]
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        for module in stay:
            module.eval()
