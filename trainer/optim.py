"""Parameter groups, the optimizer, one exact update, and the moving average of the weights."""

from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from configs.errors import ConfigError
from configs.sections import OptimConfig
from trainer.optimizer import Group, Optimizer
from trainer.recompute import blocks
from trainer.updates import check_installed


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[Group]:
    """Weights that decay and those that do not: norms and biases, told by having fewer than two dimensions, and what a
    network of timm names itself (its `no_weight_decay`: positions, tokens). With layer_decay both once a layer."""
    scales, groups = layer_scales(model, config.layer_decay), dict[tuple[float, float, str], Group]()
    no_weight_decay: Callable[[], Collection[str]] = getattr(model, "no_weight_decay", tuple)
    spared = no_weight_decay()
    heads = [parameter.shape for parameter in model.parameters() if parameter.ndim == 2][-1:]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_spared = parameter.ndim < 2 or any(fnmatch(name, pattern) for pattern in spared)
            decays = config.decay_norm_and_bias or not is_spared
            decay, scale = config.weight_decay if decays else 0.0, scales[name]
            if parameter.ndim < 2:
                decay, scale = decay / config.norm_and_bias_lr, scale * config.norm_and_bias_lr
            # Muon is for matrices between features; heads, norms, biases and convolutions go by AdamW. A distilled
            # network has two heads, of one shape.
            by_adamw = config.name == "muon" and (parameter.ndim != 2 or parameter.shape in heads)
            update = "adamw" if by_adamw else config.name
            new: Group = {"params": [], "weight_decay": decay, "lr_scale": scale, "update": update}
            groups.setdefault((scale, -decay, update), new)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """What the learning rate of each parameter is multiplied by: `decay` to the number of layers after its own.

    Layers are what comes before the first block, each block, and what comes after the last, as for BEiT (Bao et al.,
    https://arxiv.org/abs/2106.08254). What lies between two blocks belongs to the one before it. A network of timm says
    itself which layer a parameter is of (its `group_matcher`).
    Raises ConfigError where the network has no sequence of blocks.
    """
    if decay == 1.0:
        return dict.fromkeys((name for name, _ in model.named_parameters()), 1.0)
    layers = _layers_by_timm(model) if hasattr(model, "group_matcher") else _layers_by_blocks(model)
    return {name: decay ** (max(layers.values()) - number) for name, number in layers.items()}


def _layers_by_timm(model: nn.Module) -> dict[str, int]:
    from timm.models import group_parameters

    group_matcher: Callable[..., Any] = model.group_matcher  # type: ignore[assignment]
    layers: dict[str, int] = group_parameters(model, group_matcher(coarse=False), reverse=True)
    return layers


def _layers_by_blocks(model: nn.Module) -> dict[str, int]:
    """From 0, what comes before the first block, to what comes after the last."""
    own_parts = [{id(parameter) for parameter in block.parameters()} for block in blocks(model)]
    if not own_parts:
        raise ConfigError("optim.layer_decay: the network has no sequence of blocks; leave it out")
    layer, layers = 0, dict[str, int]()
    for name, parameter in model.named_parameters():
        own = next((number for number, part in enumerate(own_parts, 1) if id(parameter) in part), None)
        layer = own if own is not None else len(own_parts) + 1 if layer == len(own_parts) else layer
        layers[name] = layer
    return layers


def build_optimizer(model: nn.Module, config: OptimConfig, device: torch.device) -> Optimizer:
    """The optimizer of `model`'s parameters; its learning rate is set before each update."""
    check_installed(config.name)
    fused = config.name in ("sgd", "adam", "adamw") and (
        device.type in ("cpu", "cuda") if config.fused is None else config.fused
    )
    return Optimizer(parameter_groups(model, config), config, fused=fused)


class Update(NamedTuple):
    """What one call of apply_update did; tensors, so that nothing waits for the device until they are read."""

    applied: Tensor | None
    """Bool scalar: False where the scaler found an overflow or the batch was bad. None = applied for certain."""
    grad_norm: Tensor | None
    """Norm of the true (unscaled) gradient before clipping; None where nobody asked."""


def apply_update(
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler | None,
    lr: float,
    max_grad_norm: float | None,
    *,
    want_grad_norm: bool,
    guard: Tensor | None = None,
) -> Update:
    """One update with learning rate `lr`: unscale once, clip, step,
    and tell by the scale whether the step was taken. Where `guard` is 1 it is not."""
    optimizer.lr, optimizer.guard = lr, guard
    if scaler is not None:
        scaler.unscale_(optimizer)  # type: ignore[arg-type]  # all that it asks of one is there
    grad_norm = None
    if max_grad_norm is not None or want_grad_norm:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grad_norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, grad_norm)
    if scaler is None:
        optimizer.step()
        return Update(None if guard is None else guard == 0, grad_norm)
    # GradScaler does not say whether it stepped, and a fused optimizer skips inside its kernel. A lower scale
    # afterwards is the sign; the tensor is read without get_scale(), which would wait for the device.
    assert scaler._scale is not None, "the loss was not scaled"
    before = scaler._scale.clone()
    scaler.step(optimizer)  # type: ignore[arg-type]
    scaler.update()
    applied = scaler._scale >= before
    return Update(applied if guard is None else applied & (guard == 0), grad_norm)


class Ema:
    """Moving average of the weights and the floating buffers; the half-life is in samples,
    so it does not depend on the batch size."""

    def __init__(self, model: nn.Module, half_life_samples: float) -> None:
        self.half_life_samples = half_life_samples
        self._live = averaged_tensors(model)
        self.tensors = {name: tensor.detach().clone() for name, tensor in self._live.items()}

    @torch.no_grad()
    def update(self, num_samples: int, samples_seen: int, applied: Tensor | None) -> None:
        """Move by `num_samples`, unless the device's bool `applied` says that the weights did not move.

        The half-life is at most a tenth of `samples_seen`, so that the start is forgotten in time.
        """
        half_life = max(1.0, min(self.half_life_samples, samples_seen / 10))
        weight = 1.0 - 0.5 ** (num_samples / half_life)
        live = [tensor.detach() for tensor in self._live.values()]
        if applied is None:
            torch._foreach_lerp_(list(self.tensors.values()), live, weight)
            return
        for average, tensor in zip(self.tensors.values(), live, strict=True):
            average.lerp_(tensor, (applied * weight).to(tensor.dtype))


def averaged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and floating buffers by name: all of the state that may be averaged."""
    named: Iterable[tuple[str, Tensor]] = (*model.named_parameters(), *persistent_buffers(model).items())
    return {name: tensor for name, tensor in named if tensor.is_floating_point()}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the state (running statistics), by name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in parameters}
