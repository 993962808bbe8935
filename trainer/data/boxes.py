"""Boxes in the images of a batch."""

import torch
from torch import Tensor


def span(start: Tensor, size: Tensor | int, length: int) -> Tensor:
    """Bool (B, length): True at the `size` places from `start` (B,) on, where they are there; both may stick out."""
    places, start = torch.arange(length, device=start.device), start.unsqueeze(1)
    return (places >= start) & (places < start + (size if isinstance(size, int) else size.unsqueeze(1)))


def box(rows: Tensor, columns: Tensor) -> Tensor:
    """Bool (B, 1, H, W) of two spans, (B, H) and (B, W): True inside both."""
    return (rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)
