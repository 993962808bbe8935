"""Images in tar files, as WebDataset lays them out, in any order: each is read from its own place."""

import hashlib
import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from configs.data_section import DataConfig
from configs.errors import ConfigError
from configs.folders import find_splits
from trainer.data.decode import DecodingError
from trainer.data.encoded import Splits, held_back, name_at, number_classes
from trainer.data.tar_index import Member, Shard, index_of

CLASSES = "classes.txt"
_OPEN_TARS = 64
"""Descriptors that a process keeps; opening a file costs 10 us, on a network more."""


@dataclass(frozen=True)
class Tars:
    """The images of one split, by shard and place in it; arrays of length N, shared by all loader workers."""

    paths: tuple[str, ...]
    """Of the shards."""
    shard: NDArray[np.int32]
    """Index into `paths`."""
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    names: bytes
    ends: NDArray[np.int64]
    """Of each name in `names`."""
    labels: NDArray[np.int64]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        return f"{self.paths[self.shard[index]]}/{name_at(self.names, self.ends, index).decode('utf-8', 'replace')}"

    def open(self, index: int) -> BinaryIO:
        size = int(self.size[index])
        content = os.pread(_open(self.paths[self.shard[index]]).descriptor, size, int(self.offset[index]))
        if len(content) < size:
            raise DecodingError(f"its tar ends after {len(content):,} of its {size:,} bytes")
        return io.BytesIO(content)


class _Tar:
    """An open file, closed when nobody has it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@lru_cache(_OPEN_TARS)
def _open(path: str) -> _Tar:
    return _Tar(os.open(path, os.O_RDONLY))


Sample = tuple[int, Member]
"""Index of the shard, and what it holds."""


def load_tars(config: DataConfig, alive: Callable[[], None]) -> Splits:
    """data.root with train/ and val/, each with tars; or with tars, of whose samples data.val_fraction is kept back."""
    train_folder, val_folder = find_splits(config)
    shards = index_of(train_folder, alive)
    notes = _left_out(train_folder, shards)
    train = _samples(shards)
    if val_folder is None:
        assert config.val_fraction is not None
        train, val = split(train, config.val_fraction)
        val_folder, val_shards = train_folder, shards
    else:
        val_shards = index_of(val_folder, alive)
        notes += _left_out(val_folder, val_shards)
        val = _samples(val_shards)
    for folder, samples in ((train_folder, train), (val_folder, val)):
        if not samples:
            raise ConfigError(f"data.root: no sample with an image is left for {folder}; it needs one")
    root = Path.cwd() / config.root
    texts = [[member.label for _, member in samples] for samples in (train, val)]
    classes, *labels = number_classes(texts[0], texts[1], _class_names(root), config.num_classes, f"data.root: {root}")
    return Splits(
        _tars(train_folder, shards, train, labels[0]),
        _tars(val_folder, val_shards, val, labels[1]),
        classes,
        tuple(notes),
    )


def _samples(shards: Sequence[Shard]) -> list[Sample]:
    return [(number, member) for number, shard in enumerate(shards) for member in shard.members]


def split(samples: Sequence[Sample], fraction: float) -> tuple[list[Sample], list[Sample]]:
    """(training, evaluation) in their order, each class by the names of its samples; see held_back()."""
    classes: dict[str, list[Sample]] = {}
    for sample in samples:
        classes.setdefault(sample[1].label, []).append(sample)
    held = set[Sample]()
    for own in classes.values():
        flags = held_back([_bytes(member.name) for _, member in own], fraction)
        held.update(sample for sample, is_held in zip(own, flags, strict=True) if is_held)
    return [sample for sample in samples if sample not in held], [sample for sample in samples if sample in held]


def _class_names(root: Path) -> tuple[str, ...] | None:
    """Those of `classes.txt`, one a line, in the order of the labels' numbers."""
    file = root / CLASSES
    if not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except ValueError as error:
        raise ConfigError(f"{file} is not UTF-8 ({error}); save it as that") from error
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if twice := [name for name, number in Counter(names).items() if number > 1]:
        raise ConfigError(f"{file} names {twice[0]!r} twice; each class needs a name of its own")
    return names


def _tars(folder: Path, shards: Sequence[Shard], samples: Sequence[Sample], labels: NDArray[np.int64]) -> Tars:
    names = [_bytes(member.name) for _, member in samples]
    lines = (f"{shards[number].name}/{m.name}\0{m.size}\0{m.label}\n" for number, m in samples)
    digest = hashlib.sha256(_bytes("".join(lines)))
    return Tars(
        tuple(str(folder / shard.name) for shard in shards),
        np.array([number for number, _ in samples], dtype=np.int32),
        np.array([member.offset for _, member in samples], dtype=np.int64),
        np.array([member.size for _, member in samples], dtype=np.int64),
        b"".join(names),
        np.cumsum([len(name) for name in names], dtype=np.int64),
        labels,
        digest.hexdigest(),
    )


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")  # as tarfile decodes them


def _left_out(folder: Path, shards: Sequence[Shard]) -> list[str]:
    counts = sum((shard.left_out for shard in shards), Counter[str]())
    parts = [f"{number:,} samples {why}" for why, number in sorted(counts.items())]
    return [f"left out   of {folder}: {', '.join(parts)}"] if parts else []
