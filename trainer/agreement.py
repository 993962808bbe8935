"""How the ranks agree on stopping, on saving and on a bad loss, without a collective of their own.

A few extra scalars ride in DDP's gradient all-reduce: a parameter `signals` of the wrapped module is given its gradient
directly, so after the backward pass every rank holds the mean of all ranks' values.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

_STOP, _SAVE, LOSS, FIRST_RANK = 0, 1, 2, 3


class Agreed(NamedTuple):
    """What holds for all ranks after a step."""

    stop: bool
    save: bool
    bad_ranks: tuple[int, ...]
    """Ranks whose loss was not finite."""
    loss: float = 0.0
    """Mean over the global batch, where someone asked for it."""


class WithSignals(nn.Module):
    """The network, plus the parameter that carries the ranks' signals; DDP goes around both."""

    def __init__(self, model: nn.Module, world_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.signals = nn.Parameter(no_signals(world_size, dtype))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(images), self.signals


def no_signals(world_size: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(FIRST_RANK + world_size, dtype=dtype)


def signal_values(
    signals: Tensor, rank: int, loss: Tensor, *, stop: bool, save: bool, loss_factor: float | None = None
) -> Tensor:
    """This rank's values, to be given to the backward pass as the gradient of `signals`. No host sync.

    `loss_factor` turns this rank's summed loss into its share of the global mean; None where nobody asks for that.
    """
    values = torch.zeros_like(signals)
    values[_STOP], values[_SAVE] = float(stop), float(save)
    if loss_factor is not None:
        values[LOSS] = loss * loss_factor
    values[FIRST_RANK + rank] = ~torch.isfinite(loss)
    return values


def agreed_from(gradient: list[float]) -> Agreed:
    """Read the reduced gradient of `signals`."""
    bad = tuple(rank for rank, value in enumerate(gradient[FIRST_RANK:]) if value)
    return Agreed(gradient[_STOP] > 0, gradient[_SAVE] > 0, bad, gradient[LOSS])


def bad_and_loss(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Of the reduced gradient, on the device: whether any rank's loss was not finite, and the global mean loss."""
    return gradient[FIRST_RANK:].sum() > 0, gradient[LOSS]


# Where reading at once would wait for the device. The tests add the CPU.
DEFERRED = ["cuda"]


class HostCopy:
    """A small tensor on its way to the host: from a GPU asynchronously,
    so that to read it one step later waits for nothing that was enqueued since."""

    def __init__(self, tensor: Tensor) -> None:
        self.is_ready = tensor.device.type not in DEFERRED
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor if self.is_ready else tensor.clone()

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        values = self._host.tolist()
        return values if isinstance(values, list) else [values]
