"""What the network is given, with all augmentation on: the same for any number of workers and processes, and after a
resume."""

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import RunConfig
from tests.dist.harness import finished, in_ranks, run, tiny_config
from tests.dist.test_any_world_size import distance
from tests.folders import noisy
from trainer.data.augment import Preprocess
from trainer.data.datasets import load_data
from trainer.data.mixing import Mixing
from trainer.data.order import Order
from trainer.data.policies import Policy
from trainer.data.stream import StreamSource
from trainer.runtime import RunContext

CPU = torch.device("cpu")
EVERYTHING: dict[str, Any] = {
    "image_size": 16,
    "image_sizes": [12, 16, 20],
    "interpolation": "random",
    "augment": {
        "flip": True,
        "policy": "randaugment",
        "policy_magnitude_std": 1.5,
        "policy_probability": 0.5,
        "color_jitter": [0.4, 0.4, 0.4, 0.1],
        "erasing": 0.5,
        "erasing_mode": "noise",
        "repeats": 2,
        "mixup": 0.2,
        "cutmix": 1.0,
    },
}


def config(root: Path, workers: int = 0, **more: Any) -> RunConfig:
    data = EVERYTHING | {"name": "imagefolder", "root": str(root), "num_workers": workers}
    return tiny_config(data=data, model={"name": "resnet18"}, loss={"label_smoothing": 0.1}, **more)


Table = dict[tuple[int, int], str]


def table(root: Path, workers: int, first: int = 0) -> Callable[[RunContext], Table]:
    """Images and targets that this rank gives to the network in two epochs of 26 samples in batches of ten, hashed, by
    (epoch, draw)."""

    def function(context: RunContext) -> Table:
        data_config = config(root).data
        data, augment = load_data(data_config), data_config.augment
        rank, world_size = context.rank, context.world_size
        order = Order(26, 3, 10, False, rank, world_size, 6, CPU, unit=augment.unit, repeats=augment.repeats)
        source = StreamSource(data.train, 3, 2, workers, CPU, policy=Policy(augment))
        preprocess = Preprocess(augment, 3, (0.5,), (0.25,), torch.float32, CPU)
        mixing = Mixing(augment, 3, 2, CPU)
        found: Table = {}
        for batch, pieces in itertools.islice(source.training(order.batches(0, first)), 6 - first):
            for draws, (pixels, labels) in zip(batch.draws, pieces, strict=True):
                if batch.is_dummy:
                    continue
                images, targets = mixing(
                    preprocess.for_training(pixels, batch.epoch, draws), labels, batch.epoch, draws
                )
                for draw, image, target in zip(draws.tolist(), images, targets, strict=True):
                    seen = image.numpy().tobytes() + target.numpy().tobytes()
                    found[batch.epoch, draw] = f"{image.shape[1]} {hashlib.sha256(seen).hexdigest()}"
        return found

    return function


def merged(parts: list[Table]) -> Table:
    return {key: value for part in parts for key, value in part.items()}


def test_images_and_targets_are_the_same_for_any_workers_and_world_size(tmp_path: Path) -> None:
    root = noisy(tmp_path / "images", train__a=13, train__b=13, val__a=1)
    alone = merged(in_ranks(tmp_path, 1, table(root, 0)))
    assert len(alone) == len(set(alone.values())) == 2 * 26
    assert len({value.partition(" ")[0] for value in alone.values()}) > 1
    for world_size, workers in ((1, 2), (2, 0), (2, 2), (3, 0)):
        assert merged(in_ranks(tmp_path, world_size, table(root, workers))) == alone
    # From the middle of an epoch on, on another number of processes.
    rest = merged(in_ranks(tmp_path, 2, table(root, 0, first=1)))
    assert len(rest) == 2 * 26 - 10
    assert rest == {key: alone[key] for key in rest}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_goes_on_to_the_same_bits(tmp_path: Path, world_size: int) -> None:
    root = noisy(tmp_path / "images", train__a=10, train__b=10, val__a=2, val__b=2)

    def until(steps: int) -> RunConfig:
        return config(root, 2, max_epochs=None, max_steps=steps, global_batch_size=8)

    whole = finished(tmp_path / "whole", until(5), world_size)
    finished(tmp_path / "cut", until(2), world_size)  # in the middle of the first epoch
    cut = finished(tmp_path / "cut", until(5), world_size)
    assert all(torch.equal(tensor, cut.export()[name]) for name, tensor in whole.export().items())
    assert cut.metric("train/loss") == whole.metric("train/loss")
    assert "sizes      12, 16, 20 pixels, drawn for each batch; evaluation 16" in whole.log()


def test_growing_images_train_and_a_network_of_one_size_is_refused(tmp_path: Path) -> None:
    root = noisy(tmp_path / "images", train__a=6, train__b=6, val__a=2, val__b=2)
    progressive = {"start_size": 32, "from_epoch": 0, "until_epoch": 2}
    data = {"name": "imagefolder", "root": str(root), "num_workers": 1, "image_size": 64, "progressive": progressive}
    attempt = finished(tmp_path / "grows", tiny_config(data=data, model={"name": "resnet18"}, max_epochs=3))
    assert "sizes      32 from epoch 0, 64 from epoch 1; evaluation 64" in attempt.log()
    refused = run(tmp_path / "refused", tiny_config(data=data), 2)
    assert refused.statuses == [2, 2]
    message = refused.outcome().message or ""
    assert "the network takes images of data.image_size=64 pixels and not of 32, which training would give" in message


@pytest.mark.parametrize("world_size", [2, 3])
def test_copies_are_mixed_with_other_images_alike_on_any_number_of_processes(tmp_path: Path, world_size: int) -> None:
    augment = {"mixup": 0.8, "cutmix": 1.0, "repeats": 3, "erasing": 0.5}
    settings: dict[str, Any] = {"data__augment": augment, "global_batch_size": 15, "dtype": "float64"}
    alone = finished(tmp_path / "1", tiny_config(**settings), 1)
    other = finished(tmp_path / "n", tiny_config(**settings, max_per_device_batch_size=6), world_size)
    assert distance(other.weights(), alone.weights()) <= 1e-12
    assert f"per-device {4 if world_size == 2 else 6} x" in other.log()
