"""What data sets of encoded images have in common, whatever they lie in: files, tars or Arrow tables."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from configs.errors import ConfigError


class Encoded(Protocol):
    """The images of one split as they are stored, in an order that is the same on every machine."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Number of each image's class, (N,)."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over what each image is called and how many bytes it has."""

    def __len__(self) -> int: ...

    def path(self, index: int) -> str:
        """Where an image lies, for messages."""

    def open(self, index: int) -> str | BinaryIO:
        """The path of a file, or its content. Raises OSError."""


@dataclass(frozen=True)
class Splits:
    """Both splits, the classes of the training split, and lines for the console."""

    train: Encoded
    evaluation: Encoded
    classes: tuple[str, ...]
    notes: tuple[str, ...]


def name_at(names: bytes, ends: NDArray[np.int64], index: int) -> bytes:
    """Number `index` of names that lie in one piece of memory; each ends where `ends` (N,) says."""
    return names[int(ends[index - 1]) if index else 0 : int(ends[index])]


def held_back(names: Sequence[bytes], fraction: float) -> list[bool]:
    """Of one class: which are for evaluation, as the hash of the name is below `fraction` as a share of all hashes. So
    none changes sides when others come or go, but where that leaves nothing to train on: then the one with the largest
    hash is trained on, as long as it is that."""
    hashes = [int.from_bytes(hashlib.sha256(name).digest()[:8], "big") for name in names]
    last = max(range(len(names)), key=lambda number: (hashes[number], names[number]))
    return [value < int(fraction * 2**64) and number != last for number, value in enumerate(hashes)]


def number_classes(
    train: Sequence[str], evaluation: Sequence[str], names: Sequence[str] | None, num_classes: int | None, what: str
) -> tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.int64]]:
    """The classes and the number of each sample's, of labels as they are written: numbers, or names.

    With `names` the labels are places among them, if all are numbers below their count, else names. Without, numbers
    name themselves, up to `num_classes` or the largest; other labels are numbered in the order of their names in the
    training split. Raises ConfigError, naming `what`, for a label that is none of these.
    """
    found = sorted(set(train))
    are_numbers = all(text.isdecimal() and text == str(int(text)) for text in found)
    largest = max((int(text) for text in found), default=-1) if are_numbers else None
    if names is None and largest is not None:
        names = [str(number) for number in range(max(num_classes or 0, largest + 1))]
    names = tuple(found if names is None else names)
    if num_classes not in (None, len(names)):
        raise ConfigError(f"data.num_classes is {num_classes} but {what} has {len(names)} classes")
    if len(names) < 2:
        raise ConfigError(
            f"{what} has {f'the class {names[0]} alone' if names else 'no class'}; wanted are two or more"
        )
    are_places = largest is not None and largest < len(names)
    numbers = {str(number) if are_places else name: number for number, name in enumerate(names)}
    return names, _numbered(train, numbers, what), _numbered(evaluation, numbers, what)


def _numbered(texts: Sequence[str], numbers: dict[str, int], what: str) -> NDArray[np.int64]:
    strangers = sorted(set(texts) - numbers.keys())
    if strangers:
        more = f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""
        raise ConfigError(
            f"{what} has the labels {', '.join(map(repr, strangers[:5]))}{more}, which are no class of the training "
            "split; add them to what is trained on, or take them away"
        )
    return np.fromiter((numbers[text] for text in texts), np.int64, len(texts))
