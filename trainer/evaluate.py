"""Exact evaluation: each sample of the split once, whatever the number of processes, and the count is checked."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.errors import TrainingError
from configs.sections import EvalConfig
from trainer.data.augment import Preprocess
from trainer.data.source import Source
from trainer.memory import told_if_out_of_memory
from trainer.optim import averaged_tensors
from trainer.runtime import RunContext
from trainer.stop import StopFlag


@dataclass(frozen=True)
class EvalResult:
    """Fractions in [0, 1]; `loss` is the mean over `count` samples;
    `top5` only where there are more than five classes."""

    loss: float
    top1: float
    top5: float | None
    count: int

    def metrics(self, prefix: str) -> dict[str, float]:
        values = {"loss": self.loss, "top1": self.top1} | ({} if self.top5 is None else {"top5": self.top5})
        return {f"eval/{prefix}{name}": value for name, value in values.items()}

    def describe(self, of: str) -> str:
        """One console line, in percent; `of` says which weights."""
        top5 = "" if self.top5 is None else f"  top-5 {100 * self.top5:.2f} %"
        of = f" {of}" if of else ""
        return f"evaluated {self.count}/{self.count}{of}: top-1 {100 * self.top1:.2f} %{top5}  loss {self.loss:.4f}"


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

    def evaluate(
        self,
        context: RunContext,
        weights: dict[str, Tensor],
        stop: StopFlag | None = None,
        alive: Callable[[], None] = lambda: None,
    ) -> EvalResult | None:
        """Evaluate `weights` (averaged_tensors of this rank's network, or of its EMA). Called by all ranks.

        With `stop` the ranks agree between turns whether to go on; None is returned if not. `alive` is called in each.
        """
        load_averaged(self.model, weights, context, averages=self.has_own_statistics)
        copy_other_buffers(self.trained, self.model, context)
        batches = self._batches()
        mine = self._share_of(context, len(batches))
        hits = torch.zeros(min(5, self.num_classes), dtype=torch.int64, device=context.device)
        seen = 0
        # One slot a batch: each is filled by one rank, the rest adds exact zeros, and the sum is taken in one fixed
        # order.
        losses = torch.zeros(len(batches), dtype=context.widest_dtype, device=context.device)
        loaded = self.source.evaluation([batches[i] for i in mine])
        fix = f"use an eval.batch_size below {self.config.batch_size}"
        with told_if_out_of_memory("in evaluation", fix), torch.inference_mode():
            for turn in range(self._num_turns(context, len(batches))):
                alive()
                if turn < len(mine):
                    images, labels = next(loaded)
                    losses[mine[turn]], correct = self._score(context, images, labels)
                    hits += correct
                    seen += len(labels)
                if stop is not None and context.any_rank(stop.is_set):
                    return None
        context.all_reduce_sum(losses)
        *by_place, count = context.all_reduce_sum(torch.cat([hits, hits.new_tensor([seen])])).tolist()
        if count != len(self.source):
            raise TrainingError(
                f"evaluated {count} of {len(self.source)} samples; the ranks do not see the same data set"
            )
        loss = float(losses.cpu().double().sum()) / count
        return EvalResult(loss, by_place[0] / count, sum(by_place) / count if self.num_classes > 5 else None, count)

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

    def _score(self, context: RunContext, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss, and what correct_by_place() counts."""
        images = self.preprocess.normalise(images)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with context.autocast():
            logits = self.model(images)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return self.loss_sum(logits, labels), correct_by_place(logits, labels, min(5, self.num_classes))


def correct_by_place(logits: Tensor, labels: Tensor, places: int) -> Tensor:
    """Of logits (N, classes) and labels (N,): how many samples have their class in first place, in second, ...;
    int64 of shape (places,)."""
    return (logits.topk(places, dim=1).indices == labels[:, None]).sum(0)


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
