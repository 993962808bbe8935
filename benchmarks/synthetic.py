"""Data of the benchmarks' own, as a configuration names them (module:callable)."""

import torch

from trainer.data.datasets import TensorSplit


def images(train: bool) -> TensorSplit:
    """Random 3x32x32 images of ten classes."""
    generator = torch.Generator().manual_seed(int(train))
    count = 25_600 if train else 500
    pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return TensorSplit(pixels, torch.randint(0, 10, (count,), generator=generator))


def large_images(train: bool) -> TensorSplit:
    """Random 3x224x224 images of a thousand classes; 308 MB to train on."""
    generator = torch.Generator().manual_seed(int(train))
    count = 2048 if train else 8
    pixels = torch.randint(0, 256, (count, 3, 224, 224), dtype=torch.uint8, generator=generator)
    return TensorSplit(pixels, torch.randint(0, 1000, (count,), generator=generator))
