"""Images in the Arrow tables of a Hugging Face data set: memory-mapped, each row read from its own place.

prepare_tables.py has found or made the files and says in an index which they are.
"""

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from configs.data_section import DataConfig
from configs.errors import ConfigError, EnvironmentProblem
from configs.hugging_face import index_file
from trainer.data.decode import DecodingError
from trainer.data.encoded import Splits, number_classes


class Tables:
    """The images of one split; `what` names it in messages."""

    def __init__(self, images: pa.ChunkedArray, labels: NDArray[np.int64], what: str) -> None:
        self.labels, self._images, self._what = labels, images, what
        sizes = pc.fill_null(pc.binary_length(pc.struct_field(images, "bytes")), -1).to_numpy()
        self.fingerprint = hashlib.sha256(sizes.astype(np.int64).tobytes() + labels.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        return f"row {index} of {self._what}"

    def open(self, index: int) -> str | BinaryIO:
        value = self._images[index]
        content, path = (None, None) if not value.is_valid else (value["bytes"].as_py(), value["path"].as_py())
        if content is not None:
            return io.BytesIO(content)
        if path is None:
            raise DecodingError("it holds no image")
        return str(path)


def load_tables(config: DataConfig) -> Splits:
    """Both splits by the index that was prepared. Raises ConfigError and EnvironmentProblem where it does not fit."""
    settings = config.huggingface
    index = json.loads(index_file(config.root, settings).read_text(encoding="utf-8"))
    tables = {split: _table(files) for split, files in index["files"].items()}
    names = [settings.train_split, settings.eval_split]
    texts = [_labels(tables[name][settings.label_column], f"{settings.path}[{name}]") for name in names]
    classes, *labels = number_classes(
        texts[0], texts[1], index["classes"], config.num_classes, f"huggingface.path: {settings.path}"
    )
    train, evaluation = (
        Tables(tables[name][settings.image_column], numbers, f"{settings.path}[{name}]")
        for name, numbers in zip(names, labels, strict=True)
    )
    return Splits(train, evaluation, classes, ())


def _table(files: Sequence[Sequence[Any]]) -> pa.Table:
    parts = []
    for name, size in files:
        if not Path(name).is_file() or Path(name).stat().st_size != size:
            raise EnvironmentProblem(
                f"{name} is gone, or not as it was when the run was prepared; start the command again"
            )
        parts.append(pa.ipc.open_stream(pa.memory_map(name)).read_all())
    return pa.concat_tables(parts)


def _labels(column: pa.ChunkedArray, what: str) -> list[str]:
    texts = ["" if value is None else str(value) for value in column.to_pylist()]
    if (bad := next((row for row, text in enumerate(texts) if text in ("", "-1")), None)) is not None:
        raise ConfigError(f"row {bad} of {what} has no label; choose a split whose rows have one")
    return texts
