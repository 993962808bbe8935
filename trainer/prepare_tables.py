"""Finds the Arrow files of a Hugging Face data set, once, and writes down which they are: without a network `datasets`
takes what it finds in its cache, whatever revision was asked for, and a run must not change under way."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.contract import write_atomically
from configs.data_section import DataConfig
from configs.errors import ConfigError, EnvironmentProblem, first_line
from configs.hugging_face import index_file

_SAVED = ("dataset_dict.json", "state.json")


def prepare_tables(config: DataConfig) -> None:
    """Have the index of the data set there, and the files that it names. Raises ConfigError and EnvironmentProblem."""
    found, index = _sources(config), index_file(config.root, config.huggingface)
    if not _holds(index, found):
        index.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(index, json.dumps(_resolve(config, index) | {"sources": found}))


def _sources(config: DataConfig) -> list[list[Any]]:
    """Of a data set in a folder all its files, with sizes in bytes and times of change in ns; of the hub's none."""
    root = Path(config.huggingface.path or "")
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else []
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _holds(index: Path, sources: Sequence[Any]) -> bool:
    try:
        facts = json.loads(index.read_text(encoding="utf-8"))
        files = [file for split in facts["files"].values() for file in split]
        return facts["sources"] == sources and all(Path(name).stat().st_size == size for name, size in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _resolve(config: DataConfig, index: Path) -> dict[str, Any]:
    settings = config.huggingface
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "data.name: huggingface needs the package datasets, which is not installed; `pip install datasets`"
        ) from error
    datasets.disable_progress_bars()
    files, classes = {}, None
    for split in (settings.train_split, settings.eval_split):
        rows = _rows(datasets, config, split)
        classes = _check(datasets, config, rows, split) or classes
        files[split] = _files(index, rows, split)
    return {"files": files, "classes": classes}


def _rows(datasets: Any, config: DataConfig, split: str) -> Any:
    settings, place = config.huggingface, Path(config.huggingface.path or "")
    try:
        if any((place / name).is_file() for name in _SAVED):
            saved = datasets.load_from_disk(str(place))
            if not isinstance(saved, datasets.DatasetDict) or split not in saved:
                has = ", ".join(saved) if isinstance(saved, datasets.DatasetDict) else "one split without a name"
                raise ConfigError(
                    f"data.huggingface.path: {place} has {has}, not {split!r}; set train_split and eval_split, or save "
                    "a DatasetDict that has both"
                )
            return saved[split]
        print(f"looking for {settings.path}[{split}]", flush=True)
        return datasets.load_dataset(settings.path, settings.subset, split=split, revision=settings.revision)
    except ConfigError:
        raise
    except Exception as error:  # of its many kinds
        raise EnvironmentProblem(
            f"data.huggingface: {settings.path}[{split}] could not be had: {first_line(error)}; look at path, subset, "
            "revision and the names of the splits"
        ) from error


def _check(datasets: Any, config: DataConfig, rows: Any, split: str) -> list[str] | None:
    """The names of its classes, if it has any. Raises ConfigError for columns that are not what they should be."""
    settings, features = config.huggingface, rows.features
    for key, column in (("image_column", settings.image_column), ("label_column", settings.label_column)):
        if column not in features:
            raise ConfigError(
                f"data.huggingface.{key}: {settings.path}[{split}] has no column {column!r}; it has "
                f"{', '.join(features)}"
            )
    if not isinstance(features[settings.image_column], datasets.Image):
        kind = type(features[settings.image_column]).__name__
        raise ConfigError(
            f"data.huggingface.image_column: {settings.image_column!r} of {settings.path} is of type {kind}, not "
            "Image; cast it (cast_column), and save it to disk"
        )
    if len(rows) == 0:
        raise ConfigError(f"data.huggingface: {settings.path}[{split}] has no rows")
    return getattr(features[settings.label_column], "names", None)


def _files(index: Path, rows: Any, split: str) -> list[list[Any]]:
    """Name and size in bytes of each file. Some rows of a file only, or in another order, are written out."""
    import pyarrow as pa

    names = [file["filename"] for file in rows.cache_files]
    counts = [sum(len(batch) for batch in pa.ipc.open_stream(pa.memory_map(name))) for name in names]
    if rows._indices is not None or sum(counts) != len(rows):
        place = index.with_name(f"{index.stem}-{hashlib.sha256(split.encode()).hexdigest()[:12]}")
        shutil.rmtree(place, ignore_errors=True)  # it may have more files than there are to be
        rows.save_to_disk(str(place))
        names = [str(path) for path in sorted(place.glob("*.arrow"))]
    return [[str(Path(name).resolve()), Path(name).stat().st_size] for name in names]
