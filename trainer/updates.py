"""Updates beside SGD's and Adam's, by the functions behind torch's and timm's optimizers."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import ConfigError
from configs.sections import OptimConfig

Entries = Callable[[str], list[Tensor]]
"""What the state has of each parameter under a name."""
Update = Callable[[list[nn.Parameter], Entries, OptimConfig, float, float], None]
"""Of parameters that have a gradient, with a learning rate and a weight decay."""


def lamb(params: list[nn.Parameter], entries: Entries, config: OptimConfig, lr: float, weight_decay: float) -> None:
    """You et al., https://arxiv.org/abs/1904.00962, as timm has it; its clipping is optim.max_grad_norm here."""
    from timm.optim.lamb import lamb as update

    steps, (beta1, beta2) = entries("step"), config.betas
    torch._foreach_add_(steps, 1)
    number = int(steps[0])
    update(
        list[Tensor](params),
        _gradients(params),
        entries("exp_avg"),
        entries("exp_avg_sq"),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        beta3=1 - beta1,
        bias_correction1=1 - beta1**number,
        bias_correction2=1 - beta2**number,
        eps=config.eps,
        weight_decay=weight_decay,
        decoupled_decay=False,
        max_lr=None,
        trust_clip=False,
        always_adapt=False,
        caution=False,
    )


def lion(params: list[nn.Parameter], entries: Entries, config: OptimConfig, lr: float, weight_decay: float) -> None:
    """Chen et al., https://arxiv.org/abs/2302.06675, as timm has it."""
    from timm.optim.lion import lion as update

    beta1, beta2 = config.betas
    moments = entries("exp_avg")
    rates: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "lr": lr, "weight_decay": weight_decay}
    update(list[Tensor](params), _gradients(params), moments, caution=False, **rates)


def rmsprop(params: list[nn.Parameter], entries: Entries, config: OptimConfig, lr: float, weight_decay: float) -> None:
    """torch's; its alpha is the second of optim.betas."""
    from torch.optim.rmsprop import rmsprop as update

    update(
        list[Tensor](params),
        _gradients(params),
        entries("square_avg"),
        [],
        entries("momentum_buffer"),
        entries("step"),
        lr=lr,
        alpha=config.betas[1],
        eps=config.eps,
        weight_decay=weight_decay,
        momentum=config.momentum,
        centered=False,
    )


def muon(params: list[nn.Parameter], entries: Entries, config: OptimConfig, lr: float, weight_decay: float) -> None:
    """Jordan et al., https://kellerjordan.github.io/posts/muon, as torch has it, at AdamW's learning rates (Liu et al.,
    https://arxiv.org/abs/2502.16982)."""
    from torch.optim._muon import muon as update

    update(
        list[Tensor](params),
        _gradients(params),
        entries("momentum_buffer"),
        lr=lr,
        weight_decay=weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_coefficients=(3.4445, -4.775, 2.0315),
        ns_steps=5,
        eps=1e-7,
        adjust_lr_fn="match_rms_adamw",
        has_complex=False,
    )


def _gradients(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


UPDATES: dict[str, Update] = {"lamb": lamb, "lion": lion, "rmsprop": rmsprop, "muon": muon}
STATE = {
    "lamb": ("step", "exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "rmsprop": ("step", "square_avg", "momentum_buffer"),
    "muon": ("momentum_buffer",),
}
"""What each keeps of a parameter: tensors like it, and `step`, a counter on the host."""


def check_installed(name: str) -> None:
    """Raise ConfigError where timm, which has the update, is missing, or has it under another name."""
    if name not in ("lamb", "lion"):
        return
    try:
        getattr(importlib.import_module(f"timm.optim.{name}"), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"optim.name: {name} needs timm 1.0.31 or later; `pip install -U timm` ({error})") from error
