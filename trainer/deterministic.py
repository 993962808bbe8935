"""Kernels that give the same bits each time, for virtual shards; and which operation has none, in one sentence."""

import contextlib
import re
from collections.abc import Iterator

import torch
from torch import nn

from configs.errors import ConfigError

_REFUSAL = re.compile(r"(\S+) does not have a deterministic implementation")


def ask_for_deterministic_kernels(*, wanted: bool = True, compiles: bool = False) -> None:
    """Have torch take deterministic kernels, and raise where an operation has none; on a CPU too, whose threads may
    add in any order (the backward pass of `table[index]`)."""
    if compiles:
        torch.use_deterministic_algorithms(wanted)  # the compiler's own kernels as well
        # Beyond its limit the compiler leaves the rest uncompiled, and what that is depends on the rank.
        torch._dynamo.config.fail_on_recompile_limit_hit = wanted
    else:
        # The same without importing the compiler, which takes 1.3 s.
        torch.set_deterministic_debug_mode("error" if wanted else "default")
    # For finding faults only: it costs a write of all memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # torch's stubs lack it
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = not wanted  # torch's default is True


@contextlib.contextmanager
def told_if_not_deterministic(model: nn.Module, device: str, *, is_asked: bool) -> Iterator[None]:
    """Torch's refusal as a ConfigError that names the operation and the layers it may be of, if it `is_asked`."""
    try:
        yield
    except Exception as error:
        if is_asked and (what := _explain(error, model, device)):
            raise ConfigError(f"virtual_shards: {what}") from error
        raise


def _explain(error: Exception, model: nn.Module, device: str) -> str | None:
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return (
            "the network was compiled anew too often, and what would go on uncompiled depends on the number of "
            "processes; use compile: false"
        )
    found = _REFUSAL.search(str(error))
    if found is None:
        return None
    layers = layers_of(found[1], model)
    which = f" (layer {', '.join(layers)})" if layers else ""
    return (
        f"{found[1]}{which} has no deterministic kernel on {device}, and equal bits need one; use another layer or "
        "virtual_shards: 0"
    )


def layers_of(operation: str, model: nn.Module) -> list[str]:
    """Names of the layers whose class the operation's name begins with: of `adaptive_max_pool2d_backward_cuda` each
    AdaptiveMaxPool2d. Torch does not say which layer it was, and functions have none."""
    plain = operation.replace("_", "").lower()
    kinds = [(name, type(module).__name__.lower()) for name, module in model.named_modules() if name]
    return [name for name, kind in kinds if plain.startswith(kind)]
