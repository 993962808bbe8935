"""Several updates as one function for torch.compile: forward pass, backward pass and optimizer of each, one after the
other, so that a small network pays for one call instead of some hundred."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from configs.sections import OptimConfig
from trainer.optimizer import Group, Optimizer

Named = dict[str, Tensor]
LossSum = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Rates:
    """What changes from one update to the next; each of shape (K,) in the dtype of the weights."""

    lr: Tensor
    correction1: Tensor
    """Of Adam: 1 - beta1 ** t."""
    correction2: Tensor
    """The square root of 1 - beta2 ** t."""


def rates_of(config: OptimConfig, lrs: Sequence[float], steps_before: int, like: Tensor) -> Rates:
    """For the updates after `steps_before` completed ones."""
    times = range(steps_before + 1, steps_before + 1 + len(lrs))
    first = [1.0 - config.betas[0] ** t for t in times]
    second = [(1.0 - config.betas[1] ** t) ** 0.5 for t in times]
    return Rates(*(torch.tensor(values, dtype=like.dtype, device=like.device) for values in (lrs, first, second)))


class Unrolled:
    """K updates of a network without buffers. Works on the parameters and the optimizer's own state, in place."""

    def __init__(
        self, model: nn.Module, loss_sum: LossSum, optimizer: Optimizer, config: OptimConfig, *, autocast: bool
    ) -> None:
        self._model, self._loss_sum, self._config, self._autocast = model, loss_sum, config, autocast
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        self._params: Named = {name: p.detach() for name, p in trained.items()}
        self._decay = {name: _decay_of(p, optimizer.param_groups) for name, p in trained.items()}
        entries = [entry for entry in ("momentum_buffer", "exp_avg", "exp_avg_sq") if _has(optimizer, entry)]
        self._state: list[Named] = [{n: optimizer.state[p][entry] for n, p in trained.items()} for entry in entries]
        self._call = torch.compile(self._steps, dynamic=False)

    def __call__(self, images: Tensor, labels: Tensor, rates: Rates) -> tuple[Tensor, Tensor, Tensor]:
        """Make K updates on images (K, B, C, H, W) and labels (K, B). None lands from the first bad one on.

        Returns (losses summed over B, shape (K,); which updates landed, bool (K,); the last gradient's norm)."""
        with torch.no_grad():
            result: tuple[Tensor, Tensor, Tensor] = self._call(
                self._params, self._state, images, labels, rates.lr, rates.correction1, rates.correction2
            )
        return result

    def _mean_loss(self, params: Named, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self._autocast):
            logits = functional_call(self._model, params | self._frozen, (images,))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return self._loss_sum(logits, labels) / len(labels)

    def _steps(
        self,
        params: Named,
        state: list[Named],
        images: Tensor,
        labels: Tensor,
        lr: Tensor,
        correction1: Tensor,
        correction2: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses, landed = [], []
        now, moments = dict(params), [dict(entry) for entry in state]
        good = torch.ones((), dtype=torch.bool, device=images.device)
        norm = torch.zeros((), device=images.device)
        for k in range(len(images)):
            gradients, loss = grad_and_value(self._mean_loss)(now, images[k], labels[k])
            for gradient in (loss, *gradients.values()):
                # NaN where an element is not finite, else 0; compiled, a sum is a vector's work and `all` is not.
                good = good & ((gradient * 0).sum() == 0)
            if k == len(images) - 1 or self._config.max_grad_norm is not None:
                norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
            if self._config.max_grad_norm is not None:
                factor = (self._config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils clips
                gradients = {name: gradient * factor for name, gradient in gradients.items()}
            for name, gradient in gradients.items():
                before = [entry[name] for entry in moments]
                new, after = self._updated(name, now[name], gradient, before, lr[k], correction1[k], correction2[k])
                now[name] = torch.where(good, new, now[name])
                for entry, old, value in zip(moments, before, after, strict=True):
                    entry[name] = torch.where(good, value, old)
            losses.append(loss * labels.shape[1])
            landed.append(good)
        for before_all, after_all in zip((params, *state), (now, *moments), strict=True):
            for name, tensor in before_all.items():
                tensor.copy_(after_all[name])
        return torch.stack(losses), torch.stack(landed), norm

    def _updated(
        self, name: str, weight: Tensor, gradient: Tensor, moments: list[Tensor], lr: Tensor, c1: Tensor, c2: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """The weight and the optimizer's moments after one update, as torch.optim.SGD, Adam and AdamW document it."""
        config, decay = self._config, self._decay[name]
        if config.name == "adamw":
            weight = weight * (1 - lr * decay)
        elif decay:
            gradient = gradient + decay * weight
        if config.name != "sgd":
            first = torch.lerp(moments[0], gradient, 1 - config.betas[0])
            second = config.betas[1] * moments[1] + (1 - config.betas[1]) * gradient * gradient
            return weight - (lr / c1) * first / (second.sqrt() / c2 + config.eps), [first, second]
        if not moments:
            return weight - lr * gradient, []
        momentum = config.momentum * moments[0] + gradient
        step = gradient + config.momentum * momentum if config.nesterov else momentum
        return weight - lr * step, [momentum]


def _decay_of(parameter: nn.Parameter, groups: Sequence[Group]) -> float:
    return next(g["weight_decay"] for g in groups if any(p is parameter for p in g["params"]))


def _has(optimizer: Optimizer, entry: str) -> bool:
    return any(entry in state for state in optimizer.state.values())
