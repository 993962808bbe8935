"""The same images in a folder, in tars and in tables are the same training, on any number of processes and workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import RunConfig
from tests.containers import as_tables, as_tars
from tests.dist.harness import Attempt, finished, run, tiny_config
from tests.folders import noisy
from trainer.prepare_tables import prepare_tables

SEEN = {"image_size": 8, "augment": {"policy": "trivialaugment"}}
SIZES = {"train__a": 9, "train__b": 8, "val__a": 3, "val__b": 2}


def in_tars(images: Path, into: Path) -> dict[str, Any]:
    return {"name": "webdataset", "root": str(as_tars(images, into))}


def in_tables(images: Path, into: Path) -> dict[str, Any]:
    pytest.importorskip("datasets")
    path = as_tables(images, into / "saved")
    return {"name": "huggingface", "root": str(into), "huggingface": {"path": str(path)}}


def config(data: dict[str, Any], workers: int = 0, **more: Any) -> RunConfig:
    made = tiny_config(data=data | SEEN | {"num_workers": workers}, global_batch_size=6, dtype="float64", **more)
    if made.data.name == "huggingface":
        prepare_tables(made.data)
    return made


def assert_same(one: Attempt, other: Attempt, *, exactly: bool) -> None:
    for name, tensor in one.weights().items():
        tolerance = 0.0 if exactly else 1e-12
        torch.testing.assert_close(other.weights()[name], tensor, rtol=tolerance, atol=tolerance)
    assert one.metric("eval/top1") == other.metric("eval/top1")


@pytest.mark.parametrize("container", [in_tars, in_tables])
def test_as_from_a_folder(tmp_path: Path, container: Callable[[Path, Path], dict[str, Any]]) -> None:
    images = noisy(tmp_path / "images", **SIZES)
    folder = finished(tmp_path / "folder", config({"name": "imagefolder", "root": str(images)}))
    data = container(images, tmp_path / "other")
    for world_size, workers in ((1, 0), (1, 2), (2, 2), (3, 0)):
        attempt = finished(tmp_path / f"{world_size}-{workers}", config(data, workers), world_size)
        assert_same(folder, attempt, exactly=world_size == 1)


@pytest.mark.parametrize("container", [in_tars, in_tables])
def test_killed_and_gone_on_with(tmp_path: Path, container: Callable[[Path, Path], dict[str, Any]]) -> None:
    data = container(noisy(tmp_path / "images", **SIZES), tmp_path / "other")
    whole = finished(tmp_path / "whole", config(data, 2))
    kill = {"kind": "sigkill", "step": 4, "attempt": 1}
    cut = config(data, 2, checkpoint__every_steps=1, faults=[kill])
    assert run(tmp_path / "cut", cut).statuses == [-9]
    assert_same(whole, finished(tmp_path / "cut", cut), exactly=True)


def test_changed_tars_are_refused_on_resume_unless_allowed(tmp_path: Path) -> None:
    images = noisy(tmp_path / "images", **SIZES)
    data = in_tars(images, tmp_path / "tars")
    finished(tmp_path / "run", config(data))
    (tmp_path / "tars/train/00000.tar").rename(tmp_path / "tars/train/zzz.tar")
    attempt = run(tmp_path / "run", config(data, max_epochs=4))
    assert attempt.statuses == [2]
    assert "changed since it was saved (train split)" in (attempt.outcome().message or "")
    finished(tmp_path / "run", config(data, max_epochs=4), allow_changes=True)


def test_a_broken_image_in_a_tar_is_named_or_passed_over(tmp_path: Path) -> None:
    images = noisy(tmp_path / "images", **SIZES)
    (images / "train/a/03.png").write_bytes(b"no image")
    data = in_tars(images, tmp_path / "tars")
    attempt = run(tmp_path / "fail", config(data), 2)
    said = f"{tmp_path}/tars/train/00001.tar/000003.png (sample 3 of the training split) cannot be decoded: it is no"
    assert said in (attempt.outcome().message or "")
    skipping = finished(tmp_path / "skip", config(data | {"on_bad_image": "skip"}, 1))
    assert skipping.run_dir.bad_images.read_text() == f"{tmp_path}/tars/train/00001.tar/000003.png\n"
