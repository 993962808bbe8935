"""Data and models of the benchmarks' own, as a configuration names them (module:callable)."""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.data.datasets import TensorSplit

MARK = "LOCKSTEP_BENCH_MARK"
"""Environment variable: the file that MarkedNet writes its time to."""


def images(train: bool) -> TensorSplit:
    """Random 3x32x32 images of ten classes."""
    generator = torch.Generator().manual_seed(int(train))
    count = 25_600 if train else 500
    pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return TensorSplit(pixels, torch.randint(0, 10, (count,), generator=generator))


class MarkedNet(nn.Module):
    """The tutorial's net. When its second forward pass in training begins, so that the first step is over,
    it writes the time to the file that MARK names."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        sizes = (nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, num_classes))
        self.layers = nn.Sequential(nn.Flatten(), *sizes)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            if self.passes == 2:
                Path(os.environ[MARK]).write_text(repr(time.time()), encoding="ascii")
        logits: Tensor = self.layers(x)
        return logits
