"""The randomness of a user's own transforms is that of the sample, whoever reads it."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.errors import TrainingError
from tests import splitmix
from tests.dist.harness import in_ranks
from trainer.data.order import Order
from trainer.data.stream import StreamSource
from trainer.runtime import RunContext

CPU = torch.device("cpu")
Table = dict[tuple[int, int], tuple[float, float, float]]


class Draws:
    """Image i is what Python, NumPy and torch drew for it."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = [random.random(), np.random.rand(), torch.rand(1, dtype=torch.float64).item()]
        return torch.tensor(drawn, dtype=torch.float64).view(1, 1, 3), index


def table(workers: int, seed: int = 3, first: int = 0) -> Callable[[RunContext], Table]:
    """What this rank drew in two epochs, by (epoch, index)."""

    def function(context: RunContext) -> Table:
        order = Order(16, seed, 5, False, context.rank, context.world_size, 2, CPU)
        source = StreamSource(Draws(), seed, 1000, workers, CPU)
        found: Table = {}
        batches = source.training(order.batches(0, first))
        for batch, pieces in itertools.islice(batches, 8 - first):
            for ids, (images, labels) in zip(batch.pieces, pieces, strict=True):
                assert labels.tolist() == ids.tolist()
                found |= {
                    (batch.epoch, int(i)): tuple(image.flatten().tolist()) for i, image in zip(ids, images, strict=True)
                }
        return found

    return function


def together(tables: list[Table]) -> Table:
    return {key: value for part in tables for key, value in part.items()}


def test_table_is_the_same_for_any_workers_and_world_size(tmp_path: Path) -> None:
    (alone,) = in_ranks(tmp_path, 1, table(0))
    assert set(alone) == {(epoch, index) for epoch in range(2) for index in range(16)}
    # No sample has the numbers of another, or those of itself an epoch before.
    values = [value for row in alone.values() for value in row]
    assert len(set(values)) == 3 * 32
    for world_size, workers in ((1, 2), (2, 0), (2, 2)):
        # The last batch of an epoch is one sample, which both ranks read: one for its share, one as a dummy.
        assert together(in_ranks(tmp_path, world_size, table(workers))) == alone
    (other,) = in_ranks(tmp_path, 1, table(0, seed=4))
    assert not set(values) & {value for row in other.values() for value in row}


def test_table_goes_on_in_the_middle(tmp_path: Path) -> None:
    (whole,) = in_ranks(tmp_path, 1, table(0))
    (rest,) = in_ranks(tmp_path, 1, table(2, first=3))
    seen = splitmix.permutation(16, 3, 0)[:15]
    assert rest == {key: value for key, value in whole.items() if key not in [(0, index) for index in seen]}


def test_keys_are_those_of_the_reference(tmp_path: Path) -> None:
    (found,) = in_ranks(tmp_path, 1, table(0))
    for epoch, index in ((0, 0), (1, 7)):
        key = splitmix.key(3, epoch + 1, index)
        assert found[epoch, index][0] == random.Random(key).random()
        assert found[epoch, index][1] == np.random.RandomState(key % 2**32).rand()


class Growing:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1, 2 + index, 2, dtype=torch.uint8), 0


def test_images_of_different_shapes_are_told() -> None:
    source = StreamSource(Growing(), 0, 1000, 0, CPU)
    with pytest.raises(TrainingError, match="different shapes"):
        next(source.evaluation([range(4)]))
