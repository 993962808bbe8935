"""Gradient checkpointing (`model.checkpointing`): the activations of a block are computed again in the backward pass
instead of being kept. Random numbers are the same the second time, and BatchNorm's statistics move once."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from configs.derive import counted
from configs.errors import ConfigError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def recompute(model: nn.Module) -> str:
    """Switch it on in `model`, in place, by timm's own way where the network has it. Returns the plan screen's line.

    Raises ConfigError where there is no block: a child of a Sequential, ModuleList or ModuleDict that has two layers
    or more.
    """
    if _by_itself(model):
        what = "as the network itself does it"
    else:
        # All layers in one block would need as much memory as without.
        found = list(blocks(model)) or [b for b in blocks(model, is_stage=True) if not isinstance(b, _CONTAINERS)]
        if not found:
            raise ConfigError(
                "model.checkpointing: the network has no blocks, children of a Sequential or ModuleList with two "
                "layers or more, so there is nothing to compute again; leave it off"
            )
        for block in found:
            block.forward = partial(_forward, block, block.forward)
        what = counted(len(found), "block")
    _keep_statistics(model)
    return f"memory     gradient checkpointing, {what}: activations are computed again in the backward pass"


def _by_itself(model: nn.Module) -> bool:
    """timm's networks have a method for it; of those that cannot, it refuses."""
    own = getattr(model, "set_grad_checkpointing", None)
    try:
        return callable(own) and own(True) is None
    except AssertionError:
        return False


def blocks(module: nn.Module, *, is_stage: bool = False) -> Iterator[nn.Module]:
    """The blocks below `module`, none within another; `is_stage`: whether its children may be such."""
    for child in module.children():
        if is_stage and _num_layers(child) > 1 and not _is_stage(child):
            yield child
        else:
            yield from blocks(child, is_stage=_is_stage(child))


def _is_stage(module: nn.Module) -> bool:
    """A row of blocks, and not one of layers."""
    return isinstance(module, _CONTAINERS) and any(_num_layers(child) > 1 for child in module.children())


def _num_layers(module: nn.Module) -> int:
    """Modules in it that have parameters of their own."""
    return sum(any(True for _ in part.parameters(recurse=False)) for part in module.modules())


def _forward(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not block.training or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # A list may grow before it is needed again: that of a DenseNet does with each layer.
    args = tuple(list(arg) if isinstance(arg, list) else arg for arg in args)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _keep_statistics(model: nn.Module) -> None:
    """Have BatchNorm leave its statistics alone in a forward pass that a backward pass asks for."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            still = _Still(module)
            module.register_forward_pre_hook(still.begin)
            # Also if an error ends it: the recomputation is stopped by one as soon as it has what it needs.
            module.register_forward_hook(still.end, always_call=True)


class _Still:
    """Holds back what one BatchNorm layer is, while its statistics are not to move: with a momentum of zero it writes
    what is there, by the same kernels, which keep the same tensors."""

    def __init__(self, norm: _BatchNorm) -> None:
        self._norm = norm
        self._held: tuple[float | None, Tensor | None] | None = None

    def begin(self, *_: Any) -> None:
        # The compiler recomputes by its own means, and what it recomputes moves nothing.
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            self._held = self._norm.momentum, self._norm.num_batches_tracked
            self._norm.momentum, self._norm.num_batches_tracked = 0.0, None

    def end(self, *_: Any) -> None:
        if self._held is not None:
            self._norm.momentum, self._norm.num_batches_tracked = self._held
            self._held = None
