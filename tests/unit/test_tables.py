"""Hugging Face data sets: found once, read from their Arrow files, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.data_section import DataConfig
from configs.errors import ConfigError, EnvironmentProblem
from configs.hugging_face import index_file
from tests.containers import as_tables, samples_of
from tests.folders import make
from trainer import prepare_tables
from trainer.data.encoded import Splits
from trainer.data.splits import load_splits

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def config(tmp_path: Path, path: Path | str, **more: Any) -> DataConfig:
    return DataConfig.model_validate(
        {"name": "huggingface", "root": str(tmp_path / "data"), "huggingface": {"path": str(path)} | more}
    )


def load(settings: DataConfig) -> Splits:
    prepare_tables.prepare_tables(settings)
    return load_splits(settings)


def contents(files: Any) -> list[bytes]:
    return [files.open(index).read() for index in range(len(files))]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return make(tmp_path / "images", train__b=5, train__a=3, val__b=2)


def test_each_row_is_read_from_its_place(tmp_path: Path, images: Path) -> None:
    splits = load(config(tmp_path, as_tables(images, tmp_path / "saved")))
    assert splits.classes == ("a", "b")
    assert contents(splits.train) == [content for _, content, _ in samples_of(images, "train")]
    assert splits.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert splits.evaluation.labels.tolist() == [1, 1]
    assert splits.train.path(4) == f"row 4 of {tmp_path}/saved[train]"


def test_what_was_found_once_is_not_looked_for_again(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, as_tables(images, tmp_path / "saved"))
    first = load(settings)
    with monkeypatch.context() as patched:
        patched.setattr(prepare_tables, "_resolve", lambda *_: pytest.fail("looked for again"))
        assert load(settings).train.fingerprint == first.train.fingerprint
    shutil.rmtree(tmp_path / "saved")
    make(images, train__a=4)
    as_tables(images, tmp_path / "saved")
    changed = load(settings)
    assert len(changed.train) == 9
    assert changed.train.fingerprint != first.train.fingerprint


def test_rows_in_another_order_and_parts_of_a_split(tmp_path: Path, images: Path) -> None:
    saved = datasets.load_from_disk(str(as_tables(images, tmp_path / "saved")))
    mixed = datasets.DatasetDict({"train": saved["train"].select([5, 2, 0]), "validation": saved["validation"]})
    mixed.save_to_disk(str(tmp_path / "mixed"))
    all_of_them = [content for _, content, _ in samples_of(images, "train")]
    assert contents(load(config(tmp_path, tmp_path / "mixed")).train) == [all_of_them[row] for row in (5, 2, 0)]
    (tmp_path / "parquet").mkdir()
    saved["train"].to_parquet(str(tmp_path / "parquet" / "train.parquet"))
    parts = load(config(tmp_path, tmp_path / "parquet", train_split="train[:6]", eval_split="train[6:]"))
    assert contents(parts.train) == all_of_them[:6]
    assert contents(parts.evaluation) == all_of_them[6:]


@pytest.mark.parametrize(
    ("more", "kind", "said"),
    [
        (
            {"eval_split": "test"},
            ConfigError,
            r"saved has train, validation, not 'test'; set train_split and eval_split",
        ),
        ({"image_column": "img"}, ConfigError, r"has no column 'img'; it has image, label"),
        ({"image_column": "label"}, ConfigError, r"'label' of .* is of type ClassLabel, not Image; cast it"),
        (
            {"path": "owner/never-there"},
            EnvironmentProblem,
            r"owner/never-there\[train\] could not be had: .*; look at",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], kind: Any, said: str
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    settings = config(tmp_path, as_tables(images, tmp_path / "saved"))
    settings = config(tmp_path, **({"path": settings.huggingface.path} | more))
    with pytest.raises(kind, match=said):
        load(settings)
    assert not index_file(settings.root, settings.huggingface).exists()


def test_a_row_without_a_label_or_an_image(tmp_path: Path, images: Path) -> None:
    saved = datasets.load_from_disk(str(as_tables(images, tmp_path / "saved")))
    columns = {"image": [*saved["validation"]["image"][:1], None], "label": [0, 1]}
    features = saved["train"].features
    broken = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict({"train": saved["train"], "validation": broken}).save_to_disk(str(tmp_path / "no-image"))
    with pytest.raises(Exception, match="it holds no image"):
        load(config(tmp_path, tmp_path / "no-image")).evaluation.open(1)
    unlabelled = datasets.Dataset.from_dict(columns | {"label": [0, -1]}, features=features)
    datasets.DatasetDict({"train": saved["train"], "validation": unlabelled}).save_to_disk(str(tmp_path / "no-label"))
    with pytest.raises(ConfigError, match=r"row 1 of .*no-label\[validation\] has no label; choose a split"):
        load(config(tmp_path, tmp_path / "no-label"))


def test_files_that_went_away_are_named(tmp_path: Path, images: Path) -> None:
    settings = config(tmp_path, as_tables(images, tmp_path / "saved"))
    load(settings)
    files = json.loads(index_file(settings.root, settings.huggingface).read_text())["files"]
    Path(files["train"][0][0]).unlink()
    with pytest.raises(EnvironmentProblem, match=r"is gone, or not as it was when the run was prepared; start the"):
        load_splits(settings)
