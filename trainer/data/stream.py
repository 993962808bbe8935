"""A split that is read sample by sample through loader workers, which hand over uint8; the rest runs on the device."""

import errno
import random
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import tee
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.errors import LockstepError, TrainingError, first_line
from trainer.data.datasets import MapStyle, TensorSplit, as_image_tensor
from trainer.data.images import ImageSplit
from trainer.data.order import RankBatch, key_of
from trainer.data.policies import Policy
from trainer.data.sizes import size_at
from trainer.data.streams import Stream
from trainer.data.workers import Pair, Request, Workers, too_many_files
from trainer.places import place_of
from trainer.stop import StopFlag

_EVALUATION = -1
"""In place of the epoch where a sample is read for evaluation: its randomness, if any, is the same every time."""


class KeyedSamples:
    """Reads sample (epoch, draw), see RankBatch.draws, with Python's, NumPy's and torch's global generators seeded by
    (seed, epoch, draw).

    So a user's random transform gives the same result in any worker, on any rank and after any resume.
    """

    def __init__(self, split: MapStyle, seed: int, num_classes: int, policy: Policy | None = None) -> None:
        self.split, self.policy = split, policy
        self.seed = seed
        self.num_classes = num_classes

    def sample(self, epoch: int, draw: int, side: int | None = None) -> tuple[Tensor, int]:
        """The image and its class; `side` is that of Request."""
        image, label = self._read_one(epoch, draw, side)
        if self.policy is not None and epoch != _EVALUATION:
            image = self.policy(image, key_of(self.seed, epoch, Stream.POLICY, draw))
        return image, label

    def _read_one(self, epoch: int, draw: int, side: int | None) -> tuple[Tensor, int]:
        if isinstance(self.split, ImageSplit):  # draws by the key itself
            return self.split.sample(self.seed, epoch, draw, side)
        index = draw % len(self.split)
        key = key_of(self.seed, epoch - _EVALUATION, draw)
        random.seed(key)
        np.random.seed(key % 2**32)
        torch.default_generator.manual_seed(key % 2**63)  # torch.manual_seed seeds GPUs too: 70 us more
        image, label = self.split[index]
        return as_image_tensor(image), class_of(label, self.num_classes, index)

    def read(self, request: Request) -> Pair:
        """The samples of one batch. Raises TrainingError naming the sample that cannot be read."""
        if isinstance(self.split, TensorSplit) and self.policy is None:
            return self._read_at_once(self.split, request)
        batch = _Batch(len(request.draws))
        for draw in request.draws:
            try:
                image, label = self.sample(request.epoch, draw, request.side)
            except LockstepError:
                raise
            except Exception as error:
                raise _unreadable(draw % len(self.split), error) from None
            batch.add(image, label)
        return batch.images, torch.tensor(batch.labels)

    def _read_at_once(self, split: TensorSplit, request: Request) -> Pair:
        """Of images in memory, which nothing is random about; their labels were looked at when they were loaded."""
        ids = torch.tensor(request.draws) % len(split)
        return split.images.index_select(0, ids), split.labels.index_select(0, ids)


def _unreadable(index: int, error: Exception) -> LockstepError:
    """The user's own error, with the sample; its stack goes to the log of the rank."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return too_many_files()
    traceback.print_exc()
    what = f"{type(error).__name__}: {first_line(error)}"
    return TrainingError(f"sample {index} cannot be read: {what} ({place_of(error)})")


def class_of(label: Any, num_classes: int, index: int) -> int:
    """The label as a class number. Raises TrainingError naming the sample if it is none: losses skip or crash on it."""
    try:
        number = int(label)
        if number == label and 0 <= number < num_classes:
            return number
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise TrainingError(f"the label of sample {index} is {label!r}, not a class from 0 to {num_classes - 1}")


class _Batch:
    """Images go to their place while they lie in the processor's cache."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.images = torch.empty(0)
        self.labels: list[int] = []

    def add(self, image: Tensor, label: int) -> None:
        if not self.labels:
            self.images = torch.empty((self.size, *image.shape), dtype=image.dtype)
        shape = tuple(self.images.shape[1:])
        if image.shape != shape:
            raise TrainingError(
                f"images of one batch have different shapes: {[shape, tuple(image.shape)]}; set data.image_size for a "
                "folder of images, or resize them in the data set"
            )
        if image.dtype != self.images.dtype:
            self.images = self.images.to(torch.promote_types(image.dtype, self.images.dtype))
        self.images[len(self.labels)] = image
        self.labels.append(label)


class StreamSource:
    """Batches of a split that stays where it is."""

    def __init__(
        self,
        split: MapStyle,
        seed: int,
        num_classes: int,
        num_workers: int,
        device: torch.device,
        stop: StopFlag | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.samples = KeyedSamples(split, seed, num_classes, policy)
        self.size = len(split)
        self.num_workers = num_workers
        self.device = device
        self.stop = stop

    def __len__(self) -> int:
        return self.size

    def training(self, batches: Iterator[RankBatch]) -> Iterator[tuple[RankBatch, list[tuple[Tensor, Tensor]]]]:
        """Each batch with the images and labels of its micro-batches. One set of workers serves the whole run."""
        ours, ahead = tee(batches)
        workers = self._start(self._all_requests(ahead))
        for batch in ours:
            yield batch, [self._to_device(workers.next(request)) for request in self._requests(batch)]

    def _all_requests(self, batches: Iterator[RankBatch]) -> Iterator[Request]:
        """Without end, but for a rank that no batch of a whole epoch has a sample for: none ever will."""
        last = None
        for batch in batches:
            last = batch.epoch if last is None else last
            for request in self._requests(batch):
                last = batch.epoch
                yield request
            if batch.epoch > last + 1:
                return

    def _requests(self, batch: RankBatch) -> list[Request]:
        """One for each micro-batch. All images of a global batch are of one size, whoever reads them."""
        split, side = self.samples.split, None
        if isinstance(split, ImageSplit):
            side = size_at(split.config, self.samples.seed, batch.epoch, batch.index)
        return [Request(batch.epoch, draws.tolist(), side) for draws in batch.draws]

    def evaluation(self, batches: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each fixed range of indices."""
        requests = [Request(_EVALUATION, list(batch)) for batch in batches]
        workers = self._start(requests)
        for request in requests:
            yield self._to_device(workers.next(request))
        workers.done()

    def _start(self, requests: Iterable[Request]) -> Workers:
        is_cuda = self.device.type == "cuda"
        return Workers(self.samples.read, requests, self.num_workers, pin=is_cuda, stop=self.stop)

    def _to_device(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = pair
        return images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
