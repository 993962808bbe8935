"""The backward pass."""

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

_run_on_cpu = torch.autograd.Variable._execution_engine.run_backward


def backward(roots: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """torch.autograd.backward for gradients that have the roots' shapes, without what torch does around its engine.

    It looks at the shapes with symbols in mind, which takes 35 us a step, and 0.2 s for the import of sympy before the
    first. For a device whose backward pass has threads of its own it hands them the context of this one: 15 us more.
    """
    run = _run_on_cpu if roots[0].is_cpu else _engine_run_backward
    run(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
