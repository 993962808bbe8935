"""Virtual shards: the same bits on any number of processes. See docs/bitwise.md.

Each global batch is cut into `virtual_shards` parts, whatever the world size. A shard's gradient is computed by itself,
and the shards are added in one fixed binary tree: neighbours first, within a rank and then between ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from configs.derive import num_pieces
from trainer.agreement import LOSS, no_signals
from trainer.data.order import Order, RankBatch
from trainer.runtime import RunContext
from trainer.shard_buffers import Buffers


class Shards:
    """This rank's shards of one batch after another: `begin` and `end` around each micro-batch, then `reduce`."""

    def __init__(self, model: nn.Module, context: RunContext, order: Order, say: Callable[[str], None]) -> None:
        self._context, self._order, count = context, order, order.num_shards
        self._per_rank = count // context.world_size
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.signals = no_signals(context.world_size, context.dtype).to(context.device)
        """The ranks' summed signals after reduce(), with the loss of the whole batch among them."""
        self._size = sum(parameter.numel() for parameter in self._parameters) + len(self.signals)
        """Elements of a buffer: gradients, then signals."""
        self._buffers = Buffers(model, context, say)
        self._pairs = context.pair_groups()  # collective: once all ranks know that nothing is refused
        self._free: list[Tensor] = []
        self._tree: list[tuple[int, Tensor]] = []
        """(level, sum of 2**level neighbours), the larger ones first, as the bits of a binary counter."""
        self._done = 0

    def begin(self, batch: RankBatch, index: int) -> None:
        """Before the forward pass of micro-batch `index`: the gradients are to go to the buffer of its shard."""
        self._buffers.begin(is_first=index == 0)
        shard = batch.parts[index][0]
        if index == 0 or shard != batch.parts[index - 1][0]:
            self._fill_until(shard % self._per_rank)
            self._point_to(self._zeros())

    def end(self, batch: RankBatch, index: int, loss: Tensor) -> None:
        """After its backward pass; `loss` is summed over its samples."""
        self._signals_of(self._current)[LOSS] += loss
        self._buffers.end()
        if index == len(batch.parts) - 1 or batch.parts[index][0] != batch.parts[index + 1][0]:
            self._add(self._current)

    def reduce(self, batch: RankBatch, signals: Tensor) -> Tensor:
        """Sum over all shards of all ranks: sets the gradients and `signals`, to which each rank adds its own, and
        returns the summed loss. Collective."""
        self._fill_until(self._per_rank)
        ((_, total),) = self._tree
        self._tree, self._done = [], 0
        self._signals_of(total).add_(signals)
        for pair in self._pairs:
            self._context.all_reduce_sum(total, pair)  # a + b is b + a, so both ranks get the same bits
        self._point_to(total)
        self._free.append(total)  # taken again in the next step, when these gradients are used up
        self._buffers.settle(self._context, self._pieces_by_rank(batch.size))
        self.signals = self._signals_of(total).clone()
        loss = self.signals[LOSS].clone()
        self.signals[LOSS] /= batch.size
        return loss

    def _signals_of(self, buffer: Tensor) -> Tensor:
        return buffer[-len(self.signals) :]

    def _pieces_by_rank(self, size: int) -> list[int]:
        """How many micro-batches each rank makes of a global batch."""
        order, count = self._order, self._order.num_shards
        per_shard = [num_pieces(size, shard, count, order.max_micro_batch, order.unit) for shard in range(count)]
        return [sum(per_shard[start : start + self._per_rank]) for start in range(0, count, self._per_rank)]

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
