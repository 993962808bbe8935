"""The training loss between log points: summed where it is, reduced once a point."""

import torch
from torch import Tensor

from trainer.runtime import RunContext


class LossWindow:
    """This rank's loss, summed over its samples since it was last reduced; in float64 where the device has it."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._on_device = torch.zeros((), dtype=context.widest_dtype, device=context.device)
        self._on_host = 0.0

    def add(self, loss: Tensor | float) -> None:
        """Add a summed loss; as a number where the host has it already, which saves a kernel."""
        if isinstance(loss, float):
            self._on_host += loss
        else:
            self._on_device += loss

    def reduce(self) -> float:
        """The sum over all ranks, which start anew from zero. One collective; waits for the device."""
        total = float(self._context.all_reduce_sum(self.own()))
        self.set(torch.zeros_like(self._on_device))
        return total

    def own(self) -> Tensor:
        """This rank's sum so far, a new scalar tensor."""
        return self._on_device + self._on_host

    def set(self, value: Tensor) -> None:
        self._on_device.copy_(value)
        self._on_host = 0.0
