"""Training from a folder of images: classes, what changes under a run, and which file is which sample."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from configs.schema import RunConfig
from tests import splitmix
from tests.dist.harness import finished, in_ranks, run, tiny_config
from tests.dist.test_resume import assert_same_ending
from tests.folders import make, noisy, plain
from trainer import waiting
from trainer.data import folder, images, jpeg
from trainer.data.datasets import load_data
from trainer.data.order import Order
from trainer.data.stream import StreamSource
from trainer.runtime import RunContext

CPU = torch.device("cpu")


def config(root: Path, workers: int = 0, data: dict[str, Any] | None = None, **more: Any) -> RunConfig:
    data = {"name": "imagefolder", "root": str(root), "num_workers": workers} | (data or {})
    return tiny_config(data=data, **more)


@pytest.mark.parametrize("world_size", [1, 2])
def test_classes_have_one_number_in_both_splits(tmp_path: Path, world_size: int) -> None:
    # Every image to evaluate is one to train on, and val has no class b: only a number by itself would be wrong.
    root = make(tmp_path / "images", train__a=4, train__b=4, train__c=4, val__a=4, val__c=4)
    attempt = finished(tmp_path / "run", config(root, max_epochs=15), world_size)
    assert attempt.result()["metrics"]["eval/top1"] == 1.0
    assert json.loads(attempt.run_dir.classes.read_text()) == ["a", "b", "c"]
    assert attempt.checkpoint().state["classes"] == ["a", "b", "c"]
    assert "note: 1 of 3 classes have no image to evaluate: b" in attempt.log()


def test_a_strange_class_stops_the_run_before_its_first_step(tmp_path: Path) -> None:
    root = make(tmp_path / "images", train__a=4, train__b=4, val__a=1, val__zebra=1)
    attempt = run(tmp_path / "run", config(root), 2)
    assert attempt.statuses == [2, 2]
    outcome = attempt.outcome()
    assert (outcome.kind, outcome.step) == ("config error", None)
    assert f"{root}/val has class 'zebra', of which {root}/train has no image" in (outcome.message or "")
    assert not attempt.run_dir.checkpoints.exists()


def test_a_class_more_is_refused_on_resume(tmp_path: Path) -> None:
    root = make(tmp_path / "images", train__a=4, train__b=4, val__a=1)
    finished(tmp_path / "run", config(root))
    plain(root / "train" / "c" / "0.png", (1, 2, 3))
    attempt = run(tmp_path / "run", config(root, max_epochs=4), allow_changes=True)
    assert attempt.statuses == [2]
    assert "the class list changed: ['a', 'b'] -> ['a', 'b', 'c']" in (attempt.outcome().message or "")


@pytest.mark.parametrize("split", ["train", "val"])
def test_changed_files_are_refused_on_resume_unless_allowed(tmp_path: Path, split: str) -> None:
    root = make(tmp_path / "images", train__a=4, train__b=4, val__a=2)
    finished(tmp_path / "run", config(root))
    with (root / split / "a" / "00.png").open("ab") as file:
        file.write(b"\0")
    more = config(root, max_epochs=3)
    attempt = run(tmp_path / "run", more)
    assert attempt.statuses == [2]
    name = {"train": "train", "val": "eval"}[split]
    message = attempt.outcome().message or ""
    assert f"names or sizes of the files in {root} changed since it was saved ({name} split)" in message
    assert "--allow-changes" in message
    assert finished(tmp_path / "run", more, mode="eval").outcome().status == "done"
    attempt = finished(tmp_path / "run", more, allow_changes=True)
    assert attempt.result()["epoch"] == 3
    # From here on it is the new files that are those of the run.
    assert finished(tmp_path / "run", config(root, max_epochs=4)).result()["epoch"] == 4


def test_a_moved_folder_is_the_same(tmp_path: Path) -> None:
    root = make(tmp_path / "images", train__a=4, train__b=4, val__a=1)
    finished(tmp_path / "run", config(root))
    root.rename(tmp_path / "elsewhere")
    attempt = finished(tmp_path / "run", config(tmp_path / "elsewhere", max_epochs=3))
    assert attempt.result()["epoch"] == 3


def test_a_split_by_hash_trains(tmp_path: Path) -> None:
    root = make(tmp_path / "images", a=12, b=12)
    attempt = finished(tmp_path / "run", config(root, data={"val_fraction": 0.25}, max_epochs=1))
    facts = attempt.checkpoint().state
    assert facts["num_train"] + facts["num_eval"] == 24
    assert facts["num_eval"] >= 1


BAD = {"a/01.jpg": 1, "a/03.png": 3, "b/02.png": 8}
"""The paths of images that cannot be decoded, and their indices."""


def with_bad_ones(root: Path) -> Path:
    """Twelve images to train on, of which one is a JPEG cut to half, one empty, and one a text."""
    make(root, train__a=6, train__b=6, val__a=2, val__b=2)
    (root / "train/a/01.png").unlink()
    cut, empty, text = (root / "train" / name for name in BAD)
    Image.effect_noise((64, 64), 60).convert("RGB").save(cut)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    empty.write_bytes(b"")
    text.write_text("I am a picture\n")
    return root


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_a_bad_image_stops_the_run_with_its_path(tmp_path: Path, world_size: int, workers: int) -> None:
    root = with_bad_ones(tmp_path / "images")
    attempt = run(tmp_path / "run", config(root, workers), world_size)
    failed = [outcome for outcome in attempt.outcomes if outcome is not None and outcome.kind != "peer"]
    assert [outcome.exit_code for outcome in failed] == [1] * len(failed)
    numbers = {str(root / "train" / name): number for name, number in BAD.items()}
    for outcome in failed:
        path = (outcome.message or "").partition(" (")[0]
        assert f"{path} (sample {numbers[path]} of the training split) cannot be decoded: " in (outcome.message or "")
    assert failed


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (1, 2), (2, 2), (4, 0)])
def test_bad_images_are_replaced_and_listed(tmp_path: Path, world_size: int, workers: int) -> None:
    root = with_bad_ones(tmp_path / "images")
    attempt = finished(tmp_path / "run", config(root, workers, {"on_bad_image": "skip"}, max_epochs=3), world_size)
    bad = [str(root / "train" / name) for name in BAD]
    assert sorted(attempt.run_dir.bad_images.read_text().splitlines()) == bad
    assert attempt.result()["step"] == 3 * 2  # twelve images in batches of eight
    logs = "".join(attempt.log(rank) for rank in range(world_size))
    assert [logs.count(f"bad image  {path}: ") for path in bad] == [1, 1, 1]
    assert "bad images      3 had others in their place" in attempt.log()
    # The same by hand: each is a copy of the next.
    by_hand = with_bad_ones(tmp_path / "by-hand")
    for name, after in zip(BAD, ("a/02.png", "a/04.png", "b/03.png"), strict=True):
        (by_hand / "train" / name).write_bytes((by_hand / "train" / after).read_bytes())
    expected = finished(tmp_path / "expected", config(by_hand, max_epochs=3), world_size)
    assert_same_ending(attempt, expected)
    assert not expected.run_dir.bad_images.exists()


def test_bad_images_of_one_rank_alone_hold_up_nobody(tmp_path: Path) -> None:
    root = make(tmp_path / "images", train__a=6, train__b=6, val__a=2)
    # Rank 0 has the first half of each batch of eight.
    for index in splitmix.permutation(12, 0, 0)[:3]:
        (root / "train" / "ab"[index // 6] / f"{index % 6:02d}.png").write_bytes(b"")
    data = {"on_bad_image": "skip", "max_bad_images": 3}
    attempt = finished(tmp_path / "run", config(root, 2, data, max_epochs=1), 2)
    assert len(attempt.run_dir.bad_images.read_text().splitlines()) == 3
    # Workers read ahead into the next epoch, where the other rank may come by them first.
    assert sum(attempt.log(rank).count("bad image  ") for rank in (0, 1)) == 3


def test_more_bad_images_than_allowed_stop_the_run(tmp_path: Path) -> None:
    root = with_bad_ones(tmp_path / "images")
    data = {"on_bad_image": "skip", "max_bad_images": 2}
    attempt = run(tmp_path / "run", config(root, 2, data), 2)
    assert 1 in attempt.statuses
    messages = [outcome.message or "" for outcome in attempt.outcomes if outcome and outcome.kind == "training error"]
    assert any("3 images cannot be decoded and data.max_bad_images is 2" in message for message in messages)


def test_ranks_that_see_other_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make(tmp_path / "images", train__a=4, train__b=4, val__a=1)
    scan = folder.scan

    def scan_of_another_disk(path: Path, *more: Any) -> folder.Found:
        found = scan(path, *more)
        if os.environ.get("RANK") == "1":
            found.entries[b"a"][0] = folder.Entry(b"a/00.png", 7)
        return found

    monkeypatch.setattr(folder, "scan", scan_of_another_disk)
    attempt = run(tmp_path / "run", config(root), 2)
    assert attempt.statuses == [2, 2]
    assert "the ranks see different data sets: files: " in (attempt.outcome().message or "")


Table = dict[tuple[int, int], str]


def table(root: Path, workers: int, first: int = 0) -> Callable[[RunContext], tuple[Table, list[str]]]:
    """The pixels that this rank reads in two epochs of twelve samples in batches of five, hashed, by (epoch, index);
    and the files that it decoded in doing so, where it has no workers."""

    def function(context: RunContext) -> tuple[Table, list[str]]:
        decoded: list[str] = []
        read = images.read_pixels

        def noted(path: str, *more: Any) -> Tensor:
            decoded.append(path)
            return read(path, *more)

        images.read_pixels = noted
        data = load_data(config(root, data={"image_size": 8, "on_bad_image": "skip"}).data, root / "bad.txt")
        order = Order(12, 3, 5, False, context.rank, context.world_size, 3, CPU)
        source = StreamSource(data.train, 3, 2, workers, CPU)
        found: Table = {}
        for batch, pieces in itertools.islice(source.training(order.batches(0, first)), 6 - first):
            for ids, (pixels, labels) in zip(batch.pieces, pieces, strict=True):
                for index, image, label in zip(ids.tolist(), pixels, labels.tolist(), strict=True):
                    found[batch.epoch, index] = hashlib.sha256(image.numpy().tobytes()).hexdigest() + str(label)
        return found, decoded

    return function


def merged(parts: list[tuple[Table, list[str]]]) -> Table:
    return {key: value for part, _ in parts for key, value in part.items()}


def test_pixels_are_the_same_for_any_workers_and_world_size(tmp_path: Path) -> None:
    root = noisy(tmp_path / "images", train__a=6, train__b=6, val__a=1)
    (root / "train/a/02.png").write_bytes(b"")
    ((alone, decoded),) = in_ranks(tmp_path, 1, table(root, 0))
    assert set(alone) == {(epoch, index) for epoch in range(2) for index in range(12)}
    assert len(set(alone.values())) == 24  # the bad image is another crop of the next one
    assert len(decoded) == 24 + 2
    for world_size, workers in ((1, 2), (2, 0), (2, 2), (4, 0)):
        assert merged(in_ranks(tmp_path, world_size, table(root, workers))) == alone
    # In the middle, on another number of processes: nothing that is skipped is decoded.
    seen = splitmix.permutation(12, 3, 0)[:10]
    parts = in_ranks(tmp_path, 2, table(root, 0, first=2))
    assert merged(parts) == {key: value for key, value in alone.items() if key not in [(0, index) for index in seen]}
    skipped = {str(root / "train" / "ab"[index // 6] / f"{index % 6:02d}.png") for index in seen}
    first_epoch = [path for _, paths in parts for path in paths[:1]]
    assert not skipped & set(first_epoch)
    assert sum(len(paths) for _, paths in parts) <= 2 + 12 + 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_with_crops_goes_on_to_the_same_bits(tmp_path: Path, world_size: int) -> None:
    root = noisy(tmp_path / "images", train__a=6, train__b=6, val__a=2, val__b=2)

    def until(steps: int) -> RunConfig:
        data = {"image_size": 8, "augment": {"flip": True}}
        return config(root, 2, data, max_epochs=None, max_steps=steps, global_batch_size=5)

    whole = finished(tmp_path / "whole", until(8), world_size)
    finished(tmp_path / "cut", until(4), world_size)  # in the middle of the second epoch
    cut = finished(tmp_path / "cut", until(8), world_size)
    assert all(torch.equal(tensor, cut.export()[name]) for name, tensor in whole.export().items())
    assert cut.metric("train/loss") == whole.metric("train/loss")
    assert cut.result()["metrics"] == whole.result()["metrics"]


def test_a_resume_with_another_decoder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make(tmp_path / "images", train__a=4, train__b=4, val__a=1)
    with monkeypatch.context() as patch:
        patch.setattr(jpeg, "decoders", lambda: "a chisel")
        patch.setattr(jpeg, "describe", lambda: "images     by a chisel")
        first = finished(tmp_path / "run", config(root))
    assert "images     by a chisel" in first.log().splitlines()
    second = finished(tmp_path / "run", config(root, max_epochs=3))
    assert f"images were decoded by a chisel, now by {jpeg.decoders()}: pixels may differ" in second.log().splitlines()
    third = finished(tmp_path / "run", config(root, max_epochs=4))
    assert "pixels may differ" not in third.log()


def test_a_resume_far_into_an_epoch_decodes_nothing_that_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 samples into an epoch of 200,000: what is decoded is the first batch that is wanted, and no more."""
    name, count, seed, size = b"a/0.png", 200_000, 3, 50
    plain(tmp_path / os.fsdecode(name), (1, 2, 3))
    ends = np.arange(1, count + 1) * len(name)
    files = folder.Files(os.fsencode(tmp_path), name * count, ends, np.arange(count) % 2, "")
    split = images.ImageSplit(files, images.TRAINING, config(tmp_path, data={"image_size": 8}).data)
    seen: list[int] = []
    sample = split.sample

    def noted(seed: int, epoch: int, index: int, side: int | None) -> tuple[Tensor, int]:
        seen.append(index)
        return sample(seed, epoch, index, side)

    monkeypatch.setattr(split, "sample", noted)
    decoded: list[str] = []
    read = images.read_pixels
    monkeypatch.setattr(images, "read_pixels", lambda file, *more: decoded.append(file) or read(file, *more))
    order = Order(count, seed, size, False, 0, 1, size, CPU)
    source = StreamSource(split, seed, 2, 0, CPU)
    batch, [(pixels, _)] = next(source.training(order.batches(0, 100_000 // size)))
    assert pixels.shape == (size, 3, 8, 8)
    assert seen == splitmix.permutation(count, seed, 0)[100_000 : 100_000 + size] == batch.pieces[0].tolist()
    assert decoded == [str(tmp_path / os.fsdecode(name))] * size


def test_images_of_several_sizes_are_told_what_to_set(tmp_path: Path) -> None:
    root = noisy(tmp_path / "images", train__a=3, train__b=3, val__a=1)
    attempt = run(tmp_path / "run", config(root))
    assert attempt.statuses == [1]
    assert "different shapes" in (attempt.outcome().message or "")
    assert "set data.image_size" in (attempt.outcome().message or "")


def test_a_resident_folder_is_that_which_is_streamed(tmp_path: Path) -> None:
    root = noisy(tmp_path / "images", train__a=6, train__b=6, val__a=2, val__b=2)
    runs = []
    for residency in ("stream", "device"):
        data = {"image_size": 8, "augment": {"crop_scale": None, "flip": True}, "residency": residency}
        runs.append(finished(tmp_path / residency, config(root, data=data)))
    assert_same_ending(*runs)


def test_classes_of_any_name_go_through_a_whole_run(tmp_path: Path) -> None:
    root = make(tmp_path / "images", train__a=4, train__b=4, val__a=1, val__b=1)
    odd = [b"\xff\xfe", "日本\n".encode()]
    for split in ("train", "val"):
        for name, other in zip("ab", odd, strict=True):
            (root / split / name).rename(os.fsdecode(os.fsencode(root / split) + b"/" + other))
    finished(tmp_path / "run", config(root, 2))
    attempt = finished(tmp_path / "run", config(root, 2, max_epochs=3), 2)
    names = sorted(map(os.fsdecode, odd), key=os.fsencode)
    assert json.loads(attempt.run_dir.classes.read_text()) == names
    assert attempt.checkpoint().state["classes"] == names
    assert attempt.result()["epoch"] == 3


def test_a_run_that_waits_for_its_data_says_so_once_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "NOT_BEFORE_S", 0.0)
    root = make(tmp_path / "images", train__a=8, train__b=8, val__a=1)
    logged = {"log": {"every_steps": 1}, "max_epochs": 4}
    monkeypatch.setattr(waiting, "BOUND", 0.0)
    log = finished(tmp_path / "always", config(root, 1, **logged), 2).log()
    assert log.count(" of the steps' time went into waiting for data: 2 loader workers read ") == 2
    monkeypatch.setattr(waiting, "BOUND", 1.1)
    assert "waiting for data: " not in finished(tmp_path / "never", config(root, 1, **logged)).log()
    monkeypatch.setattr(waiting, "BOUND", 0.0)
    resident = config(root, 0, {"image_size": 8, "augment": {"crop_scale": None}, "residency": "device"}, **logged)
    assert "waiting for data: " not in finished(tmp_path / "resident", resident).log()
