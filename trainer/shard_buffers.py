"""What a forward pass changes besides gradients, under virtual shards: the same on any number of processes.

Each micro-batch starts from the buffers as they were before the batch. BatchNorm's running statistics then take in all
micro-batches in the order of the shards; any other buffer becomes what the last shard left.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from configs.errors import ConfigError
from trainer.runtime import RunContext


class Buffers:
    """All buffers of a network: `begin` and `end` around each micro-batch of this rank, then `settle`."""

    def __init__(self, model: nn.Module, context: RunContext, say: Callable[[str], None]) -> None:
        self._norms = BatchNorms(model)
        self._others = OtherBuffers(model, context, say, self._norms.buffers)

    def begin(self, *, is_first: bool) -> None:
        for part in (self._norms, self._others):
            if is_first:
                part.remember()
            else:
                part.reset()

    def end(self) -> None:
        self._norms.note()

    def settle(self, context: RunContext, pieces_by_rank: Sequence[int]) -> None:
        """After the last micro-batch of all ranks, of which each made `pieces_by_rank`. Collective."""
        if not pieces_by_rank[context.rank]:
            self.begin(is_first=True)
        self._norms.average(context, pieces_by_rank)
        self._others.take_last(context)


class BatchNorms:
    """The running statistics of all BatchNorm layers."""

    def __init__(self, model: nn.Module) -> None:
        kind = nn.modules.batchnorm._BatchNorm
        layers = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
        for name, layer in layers.items():
            _check(name, layer)
        kept = {name: layer for name, layer in layers.items() if layer.num_batches_tracked is not None}
        self._names, norms = list(kept), list(kept.values())
        self._stats = [b for norm in norms for b in (norm.running_mean, norm.running_var) if b is not None]
        self._counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        self.buffers = [*self._stats, *self._counts]
        widths = [2 * norm.num_features for norm in norms]
        self._layer = torch.arange(len(norms)).repeat_interleave(torch.tensor(widths, dtype=torch.int64))
        """Of each element of the statistics, laid out in a row: the number of its layer."""
        self._momentum = torch.empty(0)
        if norms:
            self._layer = self._layer.to(self._stats[0].device)
            self._momentum = self._stats[0].new_tensor([norm.momentum for norm in norms])[self._layer]
        self._seen: list[Tensor] = []
        self._is_watching = True
        """In the first batch of an attempt: for statistics that others move."""
        for norm in norms:
            norm.momentum = 1.0  # after a forward pass its buffers hold what it saw, and nothing of before

    def remember(self) -> None:
        self._before = [buffer.clone() for buffer in self.buffers]

    @torch.no_grad()
    def reset(self) -> None:
        if self.buffers:
            torch._foreach_copy_(self.buffers, self._before)

    def note(self) -> None:
        """Statistics, then how often each layer was called: one that was not, or is frozen, does not move."""
        if self.buffers:
            calls = torch.stack(self._counts) - torch.stack(self._before[len(self._stats) :])
            self._seen.append(torch.cat([*self._stats, calls.to(self._momentum.dtype)]))

    @torch.no_grad()
    def average(self, context: RunContext, pieces_by_rank: Sequence[int]) -> None:
        """Move the running statistics by what was noted on all ranks. Collective."""
        if not self.buffers:
            return
        mine = self._momentum.new_zeros(max(pieces_by_rank), len(self._momentum) + len(self._counts))
        if self._seen:
            mine[: len(self._seen)] = torch.stack(self._seen)
        self._seen = []
        stats, calls = context.gather_tensors(mine).split([len(self._momentum), len(self._counts)], dim=2)
        weights = (calls > 0)[..., self._layer] * self._momentum
        self.reset()
        running = torch.cat(self._stats)
        if self._is_watching:
            self._is_watching = False
            self._check_called((stats != running) & (calls == 0)[..., self._layer], pieces_by_rank)
        for rank, pieces in enumerate(pieces_by_rank):
            for seen, weight in zip(stats[rank, :pieces], weights[rank, :pieces], strict=True):
                running = running * (1 - weight) + seen * weight
        torch._foreach_copy_(self._stats, running.split([len(stat) for stat in self._stats]))
        torch._foreach_add_(self._counts, calls.sum((0, 1)).long().unbind())

    def _check_called(self, astray: Tensor, pieces_by_rank: Sequence[int]) -> None:
        """Raise ConfigError for statistics that moved, (ranks, micro-batches, elements), though no layer was called."""
        found = [self._layer[astray[rank, :pieces].any(0)] for rank, pieces in enumerate(pieces_by_rank)]
        if numbers := sorted(set(torch.cat(found).tolist())):
            raise ConfigError(
                f"virtual_shards: the statistics of {self._names[numbers[0]]} move without a call of the layer "
                "(F.batch_norm on them?); call the layer itself"
            )


def _check(name: str, layer: nn.Module) -> None:
    """Raise ConfigError for a BatchNorm that sees more than a shard, or whose average depends on what came before."""
    if isinstance(layer, nn.SyncBatchNorm):
        raise ConfigError(f"virtual_shards: {name} is a SyncBatchNorm, which mixes the ranks' shards; use a BatchNorm")
    if layer.momentum is None:
        raise ConfigError(f"virtual_shards: BatchNorm with momentum=None is not supported; give {name} a momentum")


class OtherBuffers:
    """Buffers that belong to the state and are not BatchNorm's; read by name, for a forward pass may replace them."""

    def __init__(
        self, model: nn.Module, context: RunContext, say: Callable[[str], None], taken: Sequence[Tensor]
    ) -> None:
        not_ours = {id(buffer) for buffer in taken}
        saved = model.state_dict().keys()
        names = [name for name, buffer in model.named_buffers() if id(buffer) not in not_ours]
        self._model, self._say = model, say
        self._names = [name for name in names if name in saved]
        self._tensors = {name: self._get(name) for name in self._names}
        self._unsaved = [name for name in names if name not in saved]
        self._is_watching = True
        """In the first batch of an attempt: to say which of them change."""

    def remember(self) -> None:
        self._before = {name: self._get(name).clone() for name in self._names}
        if self._is_watching:
            self._before |= {name: self._get(name).clone() for name in self._unsaved}

    def reset(self) -> None:
        for name in self._names:
            self._set(name, self._before[name])

    def take_last(self, context: RunContext) -> None:
        """The last rank has the last shard, which is never without samples. Collective."""
        if self._names:
            last = context.of_rank(context.world_size - 1, [self._get(name) for name in self._names])
            for name, value in zip(self._names, last, strict=True):
                self._set(name, value)
        if self._is_watching:
            self._is_watching = False
            self._tell(self._names, "after each batch they are what the last shard leaves")
            self._tell(self._unsaved, "not saved, so each rank has its own, and the bits may depend on them")

    def _tell(self, names: Sequence[str], what: str) -> None:
        changed = [name for name in names if not torch.equal(self._get(name), self._before[name])]
        if changed:
            more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
            self._say(f"bits       buffers that the forward pass changes, {', '.join(changed[:4])}{more}: {what}")

    def _get(self, name: str) -> Tensor:
        return self._model.get_buffer(name)

    @torch.no_grad()
    def _set(self, name: str, value: Tensor) -> None:
        """Into the tensor that it was from the start: others, such as the moving average, know that one."""
        if value.shape != self._tensors[name].shape:
            raise ConfigError(
                f"virtual_shards: the forward pass resizes {name}; give the buffer the size that it keeps"
            )
        module, _, own = name.rpartition(".")
        setattr(self._model.get_submodule(module), own, self._tensors[name].copy_(value))
