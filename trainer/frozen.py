"""Parts of a network that are not trained, and parts that are computed twice to save memory."""

import contextlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from configs.errors import ConfigError
from configs.values import did_you_mean


def freeze(model: nn.Module, patterns: Sequence[str]) -> str:
    """Take the parameters that `patterns` name out of training; returns what to say of it.

    The last pattern that fits a name counts, and one with ! before it takes back, as in a .gitignore. A BatchNorm whose
    weight is frozen uses its running statistics and leaves them alone.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in named):
            near = did_you_mean(pattern.removeprefix("!"), named)
            raise ConfigError(f"model.freeze: {pattern!r} is no parameter's name{near}")
    for name, parameter in named.items():
        fitting = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!"))]
        if fitting and not fitting[-1].startswith("!"):
            parameter.requires_grad_(False)
    trained = sum(parameter.numel() for parameter in named.values() if parameter.requires_grad)
    if not trained:
        raise ConfigError('model.freeze: nothing is left to train; take back some, e.g. "!fc.*"')
    norms = [layer for layer in model.modules() if _is_frozen_norm(layer)]
    for norm in norms:
        norm.register_forward_pre_hook(_evaluates)
    total = sum(parameter.numel() for parameter in named.values())
    statistics = f"; {len(norms)} BatchNorm layers keep their statistics" if norms else ""
    return f"frozen     {total - trained:,} of {total:,} parameters{statistics}"


def _is_frozen_norm(layer: nn.Module) -> bool:
    is_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.weight is not None
    return is_norm and not layer.weight.requires_grad


def _evaluates(layer: nn.Module, _inputs: Any) -> None:
    """Whatever mode the network is put in."""
    layer.training = False


def recompute_blocks(model: nn.Module) -> str:
    """Keep only what goes into each block, and compute the rest again when its gradient is; returns what to say of it.

    Chen et al., https://arxiv.org/abs/1604.06174.
    """
    blocks = list(blocks_of(model))
    if not blocks:
        raise ConfigError("model.checkpointing: the network has no sequence of blocks; leave it out")
    for block in blocks:
        again = partial(_contexts, block)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=again)
    return f"memory     {len(blocks)} blocks are computed again in the backward pass"


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of sequences that have parts themselves: residual blocks, encoder layers; in their order."""
    for child in module.children():
        inside = isinstance(module, nn.Sequential | nn.ModuleList)
        if inside and not isinstance(child, nn.Sequential | nn.ModuleList) and next(child.children(), None) is not None:
            yield child
        else:
            yield from blocks_of(child)


def _contexts(block: nn.Module) -> tuple[Any, Any]:
    """For the first time and for the second."""
    return contextlib.nullcontext(), _as_before(block, [layer.training for layer in block.modules()])


@contextlib.contextmanager
def _as_before(block: nn.Module, modes: list[bool]) -> Iterator[None]:
    """In the mode of the first time, whatever it is by now, and moving no running statistics."""
    now = [layer.training for layer in block.modules()]
    before = [(buffer, buffer.clone()) for buffer in block.buffers()]
    _set_modes(block, modes)
    try:
        yield
    finally:
        _set_modes(block, now)
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _set_modes(block: nn.Module, modes: list[bool]) -> None:
    for layer, mode in zip(block.modules(), modes, strict=True):
        layer.training = mode
