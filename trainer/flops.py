"""FLOPs of training, counted by torch's FlopCounterMode: exact for matrix products and convolutions, the rest is zero.

The pass that is counted is made on tensors without data (device `meta`), by a copy of the network in evaluation mode:
no weight, gradient, running statistic or random number of the training is touched, whatever wraps the real network
(DDP, compile, autocast, virtual shards), and it needs no memory. A real pass would miss what the CPU and cuDNN compute
in one kernel: attention and recurrent layers. Measured on one CPU core: 20 ms once for the tutorial's net, 35 ms for
mnist_cnn, 0.5 s for ResNet-50, at the first log point and so after the start; nothing is added to a step.
"""

import contextlib
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import first_line

DEAR_S = 1.5
"""Seconds of import for the first count in a process, most of it torch._dynamo."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per sample; a multiply-add is two."""

    forward: int
    total: int
    """Forward and backward, without the gradient of the images. What checkpointing computes again does not count."""
    unknown: str = ""
    """Why they could not be counted; then both are 0."""


def is_cheap(device: torch.device, trained_s: float) -> bool:
    """Whether a count now is no loss: it is wanted on a GPU, for MFU; the import was made already, as by torchvision's
    data sets and DDP; or it is lost in the seconds that training has taken."""
    return device.type == "cuda" or "torch._dynamo" in sys.modules or trained_s > 100 * DEAR_S


def count_flops(model: nn.Module, trained: nn.Module, batch: tuple[int, ...], dtype: torch.dtype) -> Flops:
    """Of `model`, a copy of `trained`, which knows what gets a gradient, on images of shape `batch` (N, C, H, W).

    A network that needs values, such as one that looks at its activations, is run on a black image on the CPU.
    """
    try:
        return _count(model, trained, batch, dtype, "meta")
    except Exception as error:  # whatever a network of the user's may raise, training goes on
        unknown = Flops(0, 0, f"{type(error).__name__}: {first_line(error)}")
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return unknown  # the CPU's kernel has no formula
    try:
        with _attention_in_full():
            return _count(model, trained, (1, *batch[1:]), dtype, "cpu")
    except Exception:
        return unknown


def _count(model: nn.Module, trained: nn.Module, batch: tuple[int, ...], dtype: torch.dtype, device: str) -> Flops:
    from torch.utils.flop_counter import FlopCounterMode

    network, images = copy_to(model, trained, device).eval(), torch.zeros(batch, dtype=dtype, device=device)
    formulas = {torch.ops.aten.convolution_backward: _convolution_backward}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            outputs = network(images)
            forward = counter.get_total_flops()
            outputs.sum().backward()
        total = counter.get_total_flops()
    return Flops(forward // batch[0], total // batch[0])


def copy_to(model: nn.Module, trained: nn.Module, device: str) -> nn.Module:
    """A copy of `model` whose tensors are on `device`, made without another copy where they are now."""
    wants_gradient = {name: parameter.requires_grad for name, parameter in trained.named_parameters()}
    there: dict[int, Any] = {id(buffer): _to(buffer, device) for buffer in model.buffers()}
    for name, parameter in model.named_parameters():
        there[id(parameter)] = nn.Parameter(_to(parameter, device), requires_grad=wants_gradient[name])
    return copy.deepcopy(model, there)


def _to(tensor: Tensor, device: str) -> Tensor:
    return tensor.detach().to(device, copy=True)


@contextlib.contextmanager
def _attention_in_full() -> Iterator[None]:
    """Attention as matrix products, which have a formula, instead of one kernel, which on a CPU has none."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


def _convolution_backward(
    gradient: Any, images: Any, weight: Any, *settings: Any, out_shape: Any = None, **_: Any
) -> int:
    """Each of the two gradients takes as much as the forward pass. The formula of torch 2.14 gives the weight's
    `groups` times that: seven times the whole network for a MobileNet."""
    transposed, mask = settings[4], settings[7]
    pixels = images[2:] if transposed else gradient[2:]
    return int(2 * images[0] * prod(pixels) * prod(weight) * (mask[0] + mask[1]))
