"""SGD, Adam and AdamW by torch's own kernels, and others by functions, without torch.optim.Optimizer around them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

# The functions behind the classes. The first object of a class imports torch._dynamo, which takes 1.5 s or more.
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from configs.sections import OptimConfig
from trainer.updates import STATE, UPDATES


class Group(TypedDict):
    """Parameters that are treated alike."""

    params: list[nn.Parameter]
    weight_decay: float
    lr_scale: float
    """What the learning rate is multiplied by."""
    update: str
    """Its name: sgd, adam, adamw, or one in updates.py."""


class Optimizer:
    """One update at a time; the state is there from the start, all zeros.

    `found_inf` and `grad_scale` are set by GradScaler, which knows by `_step_supports_amp_scaling` that a fused kernel
    leaves everything as it is where `found_inf` is 1. `guard` is the same for what others find: a float scalar on the
    device, 1 where this update must not happen. Without fused kernels `step()` has to wait for its value.
    """

    def __init__(self, groups: Sequence[Group], config: OptimConfig, *, fused: bool) -> None:
        self.param_groups = list(groups)
        self.fused = self._step_supports_amp_scaling = fused
        self.lr = config.lr
        self.guard: Tensor | None = None
        self._config = config
        self._is_fused_sgd = fused and config.name == "sgd"
        self.state = {p: self._initial(p, group["update"]) for group in self.param_groups for p in group["params"]}

    def _initial(self, parameter: nn.Parameter, update: str) -> dict[str, Tensor]:
        if update == "sgd":
            names: tuple[str, ...] = ("momentum_buffer",) if self._config.momentum else ()
        else:
            names = STATE.get(update, ("step", "exp_avg", "exp_avg_sq"))
        # The fused kernel reads the counter where the parameter is, the others on the host.
        counter = torch.zeros((), dtype=torch.float32, device=parameter.device if self.fused else "cpu")
        return {name: counter if name == "step" else torch.zeros_like(parameter) for name in names}

    def step(self) -> None:
        """Update all parameters that have a gradient, with learning rate `lr`."""
        if self._is_fused_sgd:  # its kernel asks no autograd: 13 us less than inside no_grad
            self._update()
            return
        with torch.no_grad():
            self._update()

    def _update(self) -> None:
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if self.guard is not None:
            found_inf = self.guard if found_inf is None else torch.maximum(self.guard, found_inf)
        if not self.fused and found_inf is not None:
            if bool(found_inf):
                return
            found_inf = None  # only the fused kernels take one
        for group in self.param_groups:
            params, name = [p for p in group["params"] if p.grad is not None], group["update"]
            if name == "sgd":
                self._sgd(params, group, found_inf)
            elif name in ("adam", "adamw"):
                self._adam(params, group, found_inf)
            elif params:
                entries, lr = partial(self._entries, params), self.lr * group["lr_scale"]
                UPDATES[name](params, entries, self._config, lr, group["weight_decay"])

    def _entries(self, params: list[nn.Parameter], name: str) -> list[Tensor]:
        return [self.state[p][name] for p in params]

    def _sgd(self, params: list[nn.Parameter], group: Group, found_inf: Tensor | None) -> None:
        config = self._config
        gradients = [p.grad for p in params if p.grad is not None]
        buffers = self._entries(params, "momentum_buffer") if config.momentum else []
        settings: dict[str, Any] = {
            "weight_decay": group["weight_decay"],
            "momentum": config.momentum,
            "lr": self.lr * group["lr_scale"],
            "dampening": 0.0,
            "nesterov": config.nesterov,
            "maximize": False,
        }
        if not self.fused:
            sgd(list[Tensor](params), gradients, [*buffers] or [None] * len(params), foreach=True, **settings)
        elif params:
            # torch's own caller first sorts the tensors by device and dtype, which all have the same: 20 us.
            scaled: dict[str, Any] = {"grad_scale": getattr(self, "grad_scale", None), "found_inf": found_inf}
            torch._fused_sgd_(list[Tensor](params), gradients, buffers, is_first_step=False, **scaled, **settings)

    def _adam(self, params: list[nn.Parameter], group: Group, found_inf: Tensor | None) -> None:
        adam(
            params,  # type: ignore[arg-type]  # a list of parameters is one of tensors
            [p.grad for p in params if p.grad is not None],
            self._entries(params, "exp_avg"),
            self._entries(params, "exp_avg_sq"),
            [],
            self._entries(params, "step"),
            foreach=not self.fused,
            fused=self.fused,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
            decoupled_weight_decay=group["update"] == "adamw",
            amsgrad=False,
            beta1=self._config.betas[0],
            beta2=self._config.betas[1],
            lr=self.lr * group["lr_scale"],
            weight_decay=group["weight_decay"],
            eps=self._config.eps,
            maximize=False,
        )
