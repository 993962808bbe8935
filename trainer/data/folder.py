"""What lies in a folder of images: which files are samples, of which class, and in which order on every machine."""

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from configs.data_section import DataConfig
from configs.derive import counted
from configs.errors import ConfigError, EnvironmentProblem
from configs.folders import find_splits
from trainer.data.encoded import Splits, held_back, name_at

# Compared in lower case.
SUFFIXES = frozenset(b".avif .bmp .gif .jfif .jpe .jpeg .jpg .jp2 .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split())
_THREADS = 4
"""On a local disk no faster than one; where each file takes a trip over the network, four times."""


class Entry(NamedTuple):
    """`path` is relative to the folder of the classes, with its class in front; `size` is in bytes."""

    path: bytes
    size: int


@dataclass(frozen=True)
class Files:
    """The samples of one split in the order of their paths' bytes. One piece of memory: loader workers share it with
    the rank, while a list of a million strings would be copied into each as their reference counts change."""

    folder: bytes
    """Absolute; that of the classes."""
    paths: bytes
    ends: NDArray[np.int64]
    """Of each path in `paths`, (N,)."""
    labels: NDArray[np.int64]
    """Number of each sample's class, (N,)."""
    fingerprint: str
    """SHA-256 over all paths and sizes."""

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, index: int) -> str:
        """Absolute; bytes that are no UTF-8 as os.fsdecode has them."""
        return os.fsdecode(os.path.join(self.folder, name_at(self.paths, self.ends, index)))  # noqa: PTH118  # bytes

    def open(self, index: int) -> str:
        return self.path(index)


@dataclass
class Found:
    """What a scan met: samples by class, and how much of what else, by why it is none."""

    entries: dict[bytes, list[Entry]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    suffixes: set[str] = field(default_factory=set)
    empty: list[bytes] = field(default_factory=list)


def load_folder(config: DataConfig, alive: Callable[[], None] = lambda: None) -> Splits:
    """Scan data.root; `alive` is called for each class. Raises ConfigError for what is no folder of classes."""
    train_folder, val_folder = find_splits(config)
    found = scan(train_folder, alive)
    notes = left_out(train_folder, found)
    train, val = found.entries, dict[bytes, list[Entry]]()
    if val_folder is None:
        assert config.val_fraction is not None
        train, val = split(train, config.val_fraction)
    else:
        found = scan(val_folder, alive)
        notes += left_out(val_folder, found)
        val = found.entries
    if len(train) < 2:
        has = ", ".join(map(os.fsdecode, train)) or "no folder with images"
        raise ConfigError(f"data.root: {train_folder} has {has}; wanted is a folder of images for each of two classes")
    classes = sorted(train)
    _check_val(classes, val, train_folder, val_folder or train_folder)
    if missing := [os.fsdecode(name) for name in classes if name not in val]:
        notes.append(f"note: {len(missing)} of {len(classes)} classes have no image to evaluate: {some(missing)}")
    return Splits(
        files_of(train_folder, train, classes),
        files_of(val_folder or train_folder, val, classes),
        tuple(map(os.fsdecode, classes)),
        tuple(notes),
    )


def _check_val(classes: list[bytes], val: Iterable[bytes], train_folder: Path, val_folder: Path) -> None:
    """Numbering each split's classes by itself would give one class two numbers."""
    if strangers := [os.fsdecode(name) for name in sorted(val) if name not in set(classes)]:
        names = some([f"'{name}'" for name in strangers])
        noun = "class" if len(strangers) == 1 else "classes"
        raise ConfigError(
            f"data.root: {val_folder} has {noun} {names}, of which {train_folder} has no image; "
            "add images to train on, or take the folder away"
        )
    if not val:
        raise ConfigError(f"data.root: {val_folder} has no image to evaluate")


def scan(folder: Path, alive: Callable[[], None] = lambda: None) -> Found:
    """Samples of a folder of classes. Links are followed, loops of them are not."""
    found = Found()
    names = []
    for entry in _list(os.fsencode(folder)):
        if entry.name.startswith(b"."):
            found.left_out["hidden"] += 1
        elif (facts := _facts(entry)) is not None and stat.S_ISDIR(facts.st_mode):
            names.append(entry.name)
        else:
            found.left_out["beside the class folders"] += 1
    with ThreadPoolExecutor(_THREADS) as threads:
        for name, part in zip(names, threads.map(partial(_scan_class, os.fsencode(folder)), names), strict=True):
            alive()
            found.left_out += part.left_out
            found.suffixes |= part.suffixes
            if part.entries:
                found.entries |= part.entries
            else:
                found.empty.append(name)
    return found


def _scan_class(folder: bytes, name: bytes) -> Found:
    found, entries = Found(), list[Entry]()
    above = frozenset([_identity(folder)])
    _walk(os.path.join(folder, name), name, above, entries, found)  # noqa: PTH118  # bytes
    if entries:
        found.entries[name] = entries
    return found


def _walk(folder: bytes, path: bytes, above: frozenset[tuple[int, int]], entries: list[Entry], found: Found) -> None:
    identity = _identity(folder)
    if identity in above:
        found.left_out["in a circle of links"] += 1
        return
    for entry in _list(folder):
        inner = path + b"/" + entry.name
        suffix = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122  # bytes
        facts = None if entry.name.startswith(b".") else _facts(entry)
        if entry.name.startswith(b"."):
            found.left_out["hidden"] += 1
        elif facts is not None and stat.S_ISDIR(facts.st_mode):
            _walk(entry.path, inner, above | {identity}, entries, found)
        elif suffix not in SUFFIXES:
            found.left_out["without an image's suffix"] += 1
            found.suffixes.add(os.fsdecode(suffix) or "none")
        elif facts is None or not stat.S_ISREG(facts.st_mode):
            found.left_out["a link to nothing or no plain file"] += 1
        else:
            entries.append(Entry(inner, facts.st_size))


def _list(folder: bytes) -> list[os.DirEntry[bytes]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot read the folder {os.fsdecode(folder)}: {error.strerror}; make it readable, or take it away"
        ) from error


def _facts(entry: os.DirEntry[bytes]) -> os.stat_result | None:
    """Of what a link leads to; None where it leads nowhere."""
    try:
        return entry.stat()
    except OSError:
        return None


def _identity(folder: bytes) -> tuple[int, int]:
    facts = os.stat(folder)  # noqa: PTH116  # bytes
    return facts.st_dev, facts.st_ino


def split(classes: dict[bytes, list[Entry]], fraction: float) -> tuple[dict[bytes, list[Entry]], ...]:
    """(training, evaluation), each class by the paths of its files; see held_back()."""
    sides = dict[bytes, list[Entry]](), dict[bytes, list[Entry]]()
    for name, entries in classes.items():
        for entry, is_held in zip(entries, held_back([entry.path for entry in entries], fraction), strict=True):
            sides[is_held].setdefault(name, []).append(entry)
    return sides


def files_of(folder: Path, classes: dict[bytes, list[Entry]], order: list[bytes]) -> Files:
    numbers = {name: number for number, name in enumerate(order)}
    samples = sorted((entry, numbers[name]) for name, entries in classes.items() for entry in entries)
    digest = hashlib.sha256(b"".join(b"%b\0%d\n" % entry for entry, _ in samples))
    lengths = np.fromiter((len(entry.path) for entry, _ in samples), np.int64, len(samples))
    labels = np.fromiter((label for _, label in samples), np.int64, len(samples))
    paths = b"".join(entry.path for entry, _ in samples)
    return Files(os.fsencode(folder), paths, lengths.cumsum(), labels, digest.hexdigest())


def left_out(folder: Path, found: Found) -> list[str]:
    """One line with what of `folder` is no sample."""
    parts = [f"{number:,} {why}" for why, number in sorted(found.left_out.items())]
    if found.suffixes:
        parts = [f"{part} ({some(sorted(found.suffixes))})" if "suffix" in part else part for part in parts]
    if found.empty:
        empty = some(sorted(map(os.fsdecode, found.empty)))
        parts.append(f"{counted(len(found.empty), 'class folder')} without an image ({empty})")
    return [f"left out   of {folder}: {', '.join(parts)}"] if parts else []


def some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
