"""A split that is read sample by sample through DataLoader workers,
which hand over uint8; the rest runs on the device."""

import random
import signal
from collections.abc import Iterator, Sequence
from itertools import tee
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from configs.errors import TrainingError
from configs.run_dir import STOP_SIGNALS
from trainer.data.datasets import MapStyle, as_image_tensor
from trainer.data.order import RankBatch, key_of
from trainer.parent import die_with_parent

_EVALUATION = -1
"""In place of the epoch where a sample is read for evaluation: its randomness, if any, is the same every time."""


class KeyedSamples:
    """Reads sample (epoch, index) with Python's, NumPy's and torch's global generators seeded by (seed, epoch, index).

    So a user's random transform gives the same result in any worker, on any rank and after any resume.
    """

    def __init__(self, split: MapStyle, seed: int, num_classes: int) -> None:
        self.split = split
        self.seed = seed
        self.num_classes = num_classes

    def __getitem__(self, sample: tuple[int, int]) -> tuple[Tensor, Tensor]:
        epoch, index = sample
        key = key_of(self.seed, epoch - _EVALUATION, index)
        random.seed(key)
        np.random.seed(key % 2**32)
        torch.manual_seed(key % 2**63)
        image, label = self.split[index]
        return as_image_tensor(image), torch.tensor(class_of(label, self.num_classes, index))


def class_of(label: Any, num_classes: int, index: int) -> int:
    """The label as a class number. Raises TrainingError naming the sample if it is none: losses skip or crash on it."""
    try:
        number = int(label)
        if number == label and 0 <= number < num_classes:
            return number
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise TrainingError(f"the label of sample {index} is {label!r}, not a class from 0 to {num_classes - 1}")


def _collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    shapes = {tuple(image.shape) for image, _ in samples}
    if len(shapes) > 1:
        raise TrainingError(
            f"images of one batch have different shapes: {sorted(shapes)[:3]}; resize them in the data set"
        )
    return torch.stack([image for image, _ in samples]), torch.stack([label for _, label in samples])


def _start_worker(_worker_id: int) -> None:
    die_with_parent()
    for name in STOP_SIGNALS:  # a scheduler signals every process; the rank stops, and its workers end with it
        signal.signal(signal.Signals[name], signal.SIG_IGN)


class StreamSource:
    """Batches of a split that stays where it is."""

    def __init__(self, split: MapStyle, seed: int, num_classes: int, num_workers: int, device: torch.device) -> None:
        self.samples = KeyedSamples(split, seed, num_classes)
        self.size = len(split)
        self.num_workers = num_workers
        self.device = device

    def __len__(self) -> int:
        return self.size

    def training(self, batches: Iterator[RankBatch]) -> Iterator[tuple[RankBatch, list[tuple[Tensor, Tensor]]]]:
        """Each batch with the images and labels of its micro-batches. One set of workers serves the whole run."""
        ours, loaders = tee(batches)
        requests = ([(batch.epoch, i) for i in ids.tolist()] for batch in loaders for ids in batch.pieces)
        loaded = iter(self._loader(requests))
        for batch in ours:
            yield batch, [self._to_device(next(loaded)) for _ in batch.pieces]

    def evaluation(self, batches: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each fixed range of indices."""
        for pair in self._loader([[(_EVALUATION, i) for i in batch] for batch in batches]):
            yield self._to_device(pair)

    def _loader(self, requests: Any) -> DataLoader[Any]:
        return DataLoader(
            self.samples,  # type: ignore[arg-type]  # needs only __getitem__: the sampler says what to read
            batch_sampler=requests,
            num_workers=self.num_workers,
            collate_fn=_collate,
            worker_init_fn=_start_worker,
            pin_memory=self.device.type == "cuda",
        )

    def _to_device(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = pair
        return images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
