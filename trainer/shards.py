"""Virtual shards: the same bits on any number of processes. See docs/bitwise.md.

Each global batch is cut into `virtual_shards` parts, whatever the world size. A shard's gradient is computed by itself,
and the shards are added in one fixed binary tree: neighbours first, within a rank and then between ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from configs.derive import num_pieces
from configs.errors import ConfigError
from trainer.agreement import no_signals
from trainer.data.order import RankBatch
from trainer.runtime import RunContext


class Shards:
    """This rank's shards of one batch after another: `begin` and `end` around each micro-batch, then `reduce`."""

    def __init__(self, model: nn.Module, context: RunContext, count: int, max_micro_batch: int) -> None:
        self._context, self._count, self._max_micro_batch = context, count, max_micro_batch
        self._per_rank = count // context.world_size
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if other := next((p.dtype for p in self._parameters if p.dtype != context.dtype), None):
            raise ConfigError(f"virtual_shards: the network has weights in {other}, expected {context.dtype} for all")
        self.signals = no_signals(context.world_size, context.dtype).to(context.device)
        """The ranks' summed signals after reduce()."""
        self._size = sum(parameter.numel() for parameter in self._parameters) + 1 + len(self.signals)
        """Elements of a buffer: gradients, loss, signals."""
        self._pairs = context.pair_groups()
        self._free: list[Tensor] = []
        self._tree: list[tuple[int, Tensor]] = []
        """(level, sum of 2**level neighbours), the larger ones first, as the bits of a binary counter."""
        self._done = 0
        self._norms = BatchNorms(model)

    def begin(self, batch: RankBatch, index: int) -> None:
        """Before the forward pass of micro-batch `index`: the gradients are to go to the buffer of its shard."""
        if index == 0:
            self._norms.remember()
        shard = batch.parts[index][0]
        if index == 0 or shard != batch.parts[index - 1][0]:
            self._fill_until(shard % self._per_rank)
            self._point_to(self._zeros())

    def end(self, batch: RankBatch, index: int, loss: Tensor) -> None:
        """After its backward pass; `loss` is summed over its samples."""
        self._current[-1 - len(self.signals)] += loss
        self._norms.note()
        if index == len(batch.parts) - 1 or batch.parts[index][0] != batch.parts[index + 1][0]:
            self._add(self._current)

    def reduce(self, batch: RankBatch, signals: Tensor) -> Tensor:
        """Sum over all shards of all ranks: sets the gradients and `signals`, and returns the loss. Collective."""
        self._fill_until(self._per_rank)
        ((_, total),) = self._tree
        self._tree, self._done = [], 0
        total[-len(signals) :] = signals
        for pair in self._pairs:
            self._context.all_reduce_sum(total, pair)  # a + b is b + a, so both ranks get the same bits
        self._point_to(total)
        self._free.append(total)  # taken again in the next step, when these gradients are used up
        self._norms.average(self._context, self._pieces_by_rank(batch.size))
        self.signals = total[-len(signals) :].clone()
        return total[-1 - len(signals)].clone()

    def _pieces_by_rank(self, size: int) -> list[int]:
        """How many micro-batches each rank makes of a global batch."""
        per_shard = [num_pieces(size, shard, self._count, self._max_micro_batch) for shard in range(self._count)]
        return [sum(per_shard[start : start + self._per_rank]) for start in range(0, self._count, self._per_rank)]

    def _zeros(self) -> Tensor:
        if self._free:
            return self._free.pop().zero_()
        return torch.zeros(self._size, dtype=self._context.dtype, device=self._context.device)

    def _point_to(self, buffer: Tensor) -> None:
        """Have the gradients lie in `buffer`, each laid out like its parameter: fused kernels go by raw offset."""
        self._current, offset = buffer, 0
        for parameter in self._parameters:
            parameter.grad = buffer.as_strided(parameter.shape, parameter.stride(), offset)
            offset += parameter.numel()

    def _fill_until(self, number: int) -> None:
        """A shard without samples is a term of the sum, too."""
        while self._done < number:
            self._add(self._zeros())

    def _add(self, buffer: Tensor) -> None:
        """Carry one more shard into the tree."""
        level = 0
        while self._tree and self._tree[-1][0] == level:
            left = self._tree.pop()[1]
            self._free.append(buffer)
            buffer, level = left.add_(buffer), level + 1
        self._tree.append((level, buffer))
        self._done += 1


class BatchNorms:
    """The running statistics of all BatchNorm layers: averaged over all micro-batches in the order of the shards."""

    def __init__(self, model: nn.Module) -> None:
        kind = nn.modules.batchnorm._BatchNorm
        self._norms = [m for m in model.modules() if isinstance(m, kind) and m.running_mean is not None]
        if any(norm.momentum is None for norm in self._norms):
            raise ConfigError("virtual_shards: BatchNorm with momentum=None is not supported; give it a momentum")
        self._buffers = [b for norm in self._norms for b in (norm.running_mean, norm.running_var) if b is not None]
        momenta = [torch.full_like(norm.running_mean, norm.momentum) for norm in self._norms for _ in range(2)]  # type: ignore[arg-type]
        self._momentum = torch.cat(momenta) if momenta else torch.empty(0)
        self._seen: list[Tensor] = []
        for norm in self._norms:
            norm.momentum = 1.0  # after a forward pass its buffers hold what it saw, and nothing of before

    def remember(self) -> None:
        self._running = self._flat()

    def note(self) -> None:
        if self._norms:
            self._seen.append(self._flat())

    @torch.no_grad()
    def average(self, context: RunContext, pieces_by_rank: Sequence[int]) -> None:
        """Move the running statistics by what was noted on all ranks. Collective."""
        if not self._norms:
            return
        width, own = len(self._momentum), len(self._seen)
        mine = self._momentum.new_zeros(max(pieces_by_rank), width)
        if self._seen:
            mine[:own] = torch.stack(self._seen)
        running = self._running if self._seen else self._flat()
        self._seen = []
        everyones = context.gather_tensors(mine)
        for rank, pieces in enumerate(pieces_by_rank):
            for seen in everyones[rank, :pieces]:
                running = running * (1 - self._momentum) + seen * self._momentum
        for buffer, value in zip(self._buffers, running.split([b.numel() for b in self._buffers]), strict=True):
            buffer.copy_(value)
        for norm in self._norms:
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked += sum(pieces_by_rank) - own

    def _flat(self) -> Tensor:
        return torch.cat(self._buffers) if self._buffers else torch.empty(0)
