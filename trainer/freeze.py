"""Parameters that do not train (`model.freeze`, `model.freeze_except`)."""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from configs.derive import counted
from configs.errors import ConfigError
from configs.sections import ModelConfig


def freeze(model: nn.Module, config: ModelConfig) -> tuple[list[nn.Module], list[str]]:
    """Have the named parameters get no gradient. Returns (the BatchNorm layers whose statistics must not move either,
    lines for the plan screen). Raises ConfigError for a name that matches nothing, and if nothing is left to train."""
    if not config.freeze and not config.freeze_except:
        return [], []
    for key, patterns in (("freeze", config.freeze), ("freeze_except", config.freeze_except)):
        _check_matches(model, key, patterns)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if _is_frozen(name, config):
            parameter.requires_grad_(False)
    trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
    if not trained:
        raise ConfigError(
            "model.freeze: nothing is left to train; name fewer, or what is to train in model.freeze_except"
        )
    norms = frozen_norms(model, config)
    total = sum(parameter.numel() for parameter in parameters.values())
    line = f"frozen     {total - trained:,} of {total:,} parameters"
    if norms:
        line += f"; {counted(len(norms), 'BatchNorm layer')} in evaluation mode, statistics as they are"
    return norms, [line]


def frozen_norms(model: nn.Module, config: ModelConfig) -> list[nn.Module]:
    """BatchNorm layers all of whose parameters are frozen; one without parameters goes by its own name."""
    found: list[nn.Module] = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            own = [parameter.requires_grad for parameter in module.parameters()]
            if not any(own) if own else _is_frozen(f"{name}.running_mean", config):
                found.append(module)
    return found


def in_evaluation(norms: Iterable[nn.Module]) -> None:
    """Put them into evaluation mode, which their network's train() ends."""
    for norm in norms:
        norm.eval()


def _is_frozen(name: str, config: ModelConfig) -> bool:
    named = not config.freeze or _matches_any(name, config.freeze)
    return named and not _matches_any(name, config.freeze_except)


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern is of the parameter `name` or of a module that it lies in."""
    parts = name.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatchcase(one, pattern) for pattern in patterns for one in names)


def _check_matches(model: nn.Module, key: str, patterns: Sequence[str]) -> None:
    parameters = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if any(_matches_any(name, [pattern]) for name in parameters):
            continue
        modules = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
        near = difflib.get_close_matches(pattern, [*modules, *parameters], n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(_first_level(parameters))}"
        raise ConfigError(f"model.{key}: {pattern!r} is no parameter or module of the network; {hint}")


def _first_level(parameters: list[str]) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in parameters))
