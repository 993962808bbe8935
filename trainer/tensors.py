"""What a network's tensors must be: such that what is trained is what is saved, and the same on all ranks."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from configs.errors import ConfigError

if TYPE_CHECKING:
    from trainer.job import Job

Shapes = dict[str, tuple[int, ...]]


def shapes_of(model: nn.Module) -> Shapes:
    """Of all parameters and buffers, by name."""
    return {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def check_tensors(model: nn.Module) -> None:
    """Raise ConfigError for a network whose parameters have no size yet, are complex, or lie upon one another."""
    named = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [name for name, tensor in named if is_lazy(tensor)]:
        raise ConfigError(
            f"model.name: {_some(lazy)} has no size before the first batch (a Lazy layer); give its sizes"
        )
    if found := [name for name, parameter in model.named_parameters() if parameter.is_complex()]:
        raise ConfigError(f"model.name: {_some(found)} is complex; keep real and imaginary part as real parameters")
    spans = sorted((*_span(parameter), name) for name, parameter in model.named_parameters() if parameter.numel())
    for (storage, _, end, one), (other_storage, start, _, other) in pairwise(spans):
        if storage == other_storage and start < end:
            raise ConfigError(
                f"model.name: {one} and {other} are two parameters on one memory; use one Parameter for both"
            )


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """Address of the storage; first and last byte in it, the last one exclusive."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), start, start + int(reach) * tensor.element_size()


def convert(model: nn.Module, **to: Any) -> nn.Module:
    """`model.to(**to)`. A buffer that several modules share stays one, of which Module.to gives each a copy."""
    shared = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    model.to(**to)
    moved: dict[int, Tensor | None] = {}
    for module, name, before in shared:
        module._buffers[name] = moved.setdefault(id(before), module._buffers[name])
    return model


def check_after_first_batch(job: "Job") -> None:
    """Raise ConfigError where the forward pass made or resized parameters or buffers, which no checkpoint could give
    back, or where the ranks' weights are not the same any more. Collective."""
    before, after = job.shapes, shapes_of(job.model)
    if changed := [name for name in (*before, *after) if before.get(name) != after.get(name)]:
        raise ConfigError(
            f"model.name: the forward pass makes or resizes {_some(list(dict.fromkeys(changed)))}; "
            "register parameters and buffers in __init__, with the size that they keep"
        )
    # A sum for each: equal weights have equal sums, different ones hardly ever. As bytes, since NaN is not NaN.
    sums = [parameter.detach().sum(dtype=job.context.widest_dtype) for parameter in job.model.parameters()]
    everyones = job.context.gather_tensors(torch.stack(sums)).view(torch.uint8).unflatten(1, (len(sums), -1))
    differs = (everyones != everyones[:1]).any(2).any(0).tolist()
    names = [name for (name, _), is_other in zip(job.model.named_parameters(), differs, strict=True) if is_other]
    if names:
        raise ConfigError(
            f"model.name: after one batch {_some(names)} is not the same on all ranks: the network sets weights by "
            "what a rank sees, or keeps state outside of parameters and buffers; initialise it first"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
