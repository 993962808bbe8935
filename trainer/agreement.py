"""How the ranks agree on stopping, on saving and on a bad loss, without a collective of their own.

A few extra scalars ride in DDP's gradient all-reduce: a parameter `signals` of the wrapped module is given its gradient
directly, so after the backward pass every rank holds the mean of all ranks' values.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

_STOP, _SAVE, _FIRST_RANK = 0, 1, 2


class Agreed(NamedTuple):
    """What holds for all ranks after a step."""

    stop: bool
    save: bool
    bad_ranks: tuple[int, ...]
    """Ranks whose loss was not finite."""


class WithSignals(nn.Module):
    """The network, plus the parameter that carries the ranks' signals; DDP goes around both."""

    def __init__(self, model: nn.Module, world_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.signals = nn.Parameter(torch.zeros(_FIRST_RANK + world_size, dtype=dtype))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(images), self.signals


def signal_values(signals: Tensor, rank: int, loss: Tensor, *, stop: bool, save: bool) -> Tensor:
    """This rank's values, to be given to the backward pass as the gradient of `signals`. No host sync."""
    values = torch.zeros_like(signals)
    values[_STOP], values[_SAVE] = float(stop), float(save)
    values[_FIRST_RANK + rank] = ~torch.isfinite(loss)
    return values


def agreed_from(gradient: list[float]) -> Agreed:
    """Read the reduced gradient of `signals`."""
    bad = tuple(rank for rank, value in enumerate(gradient[_FIRST_RANK:]) if value)
    return Agreed(gradient[_STOP] > 0, gradient[_SAVE] > 0, bad)


class HostCopy:
    """A small tensor on its way to the host: on a GPU copied asynchronously, so that reading it one step later waits
    for nothing."""

    def __init__(self, tensor: Tensor) -> None:
        self.is_ready = tensor.device.type != "cuda"
        if self.is_ready:
            self._host = tensor.detach()
        else:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
                tensor.detach(), non_blocking=True
            )
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        if not self.is_ready:
            self._event.synchronize()
        values: list[float] = self._host.flatten().tolist()
        return values
