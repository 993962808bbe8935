import subprocess
import sys

import torch

from trainer.backward import backward


def test_gradients_are_those_of_autograd() -> None:
    weight, other = (torch.nn.Parameter(torch.randn(3)) for _ in range(2))
    images, factor, values = torch.randn(3), torch.tensor(0.25), torch.tensor([1.0, 2.0, 3.0])

    def roots() -> tuple[torch.Tensor, torch.Tensor]:
        return (weight * images).tanh().sum(), other * 2

    torch.autograd.backward(list(roots()), [factor, values])
    expected = [weight.grad, other.grad]
    weight.grad = other.grad = None
    backward(roots(), (factor, values))
    backward(roots(), (factor, values))  # adds to what is there
    for found, wanted in zip((weight.grad, other.grad), expected, strict=True):
        assert found is not None
        assert wanted is not None
        assert torch.equal(found, 2 * wanted)


def test_nothing_of_it_imports_sympy() -> None:
    code = """
import sys, torch
from trainer.backward import backward
backward((torch.ones(3, requires_grad=True).sum(),), (torch.ones(()),))
assert "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
