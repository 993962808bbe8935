"""The whole split as one uint8 tensor on the device: a batch is one gather, there is no DataLoader."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainer.data.datasets import TensorSplit
from trainer.data.order import RankBatch


class ResidentSource:
    """Batches of a split that lives on `device`."""

    def __init__(self, split: TensorSplit, device: torch.device) -> None:
        self.images = split.images.to(device)
        self.labels = split.labels.to(device)

    def __len__(self) -> int:
        return len(self.images)

    def gather(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) uint8 and labels (B,) int64 of `ids` (B,) int64 on the device."""
        return self.images.index_select(0, ids), self.labels.index_select(0, ids)

    def training(self, batches: Iterator[RankBatch]) -> Iterator[tuple[RankBatch, list[tuple[Tensor, Tensor]]]]:
        """Each batch with the images and labels of its micro-batches."""
        for batch in batches:
            yield batch, [self.gather(ids) for ids in batch.pieces]

    def evaluation(self, batches: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each fixed range of indices: views, nothing is copied."""
        for batch in batches:
            yield self.images[batch.start : batch.stop], self.labels[batch.start : batch.stop]
