"""Where the members of tar files lie, so that any of them is read without those before it.

WebDataset's layout: members of one name are one sample (`0007.jpg`, `0007.cls`), told apart by what follows the first
dot. The index of a folder is kept in it, where it can be written; it holds as long as no tar changed in size or time.
"""

import contextlib
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from configs.contract import write_atomically
from configs.errors import ConfigError, EnvironmentProblem
from trainer.data.folder import SUFFIXES

INDEX = ".lockstep-index.json"
_FORMAT = 1
_THREADS = 4
"""They wait for the disk together; the headers are read one after the other."""
LABELS = ("cls", "json")


class Member(NamedTuple):
    """An image in a tar: its name there, where its bytes begin and how many they are, its label as it is written."""

    name: str
    offset: int
    size: int
    label: str


@dataclass
class Shard:
    """What one tar holds, and how much in it belongs to no sample, by why."""

    name: str
    members: list[Member] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def index_of(folder: Path, alive: Callable[[], None] = lambda: None) -> list[Shard]:
    """All tars of `folder` in the order of their names, by its index if that still holds, else read and, where it can
    be, written. Raises ConfigError and EnvironmentProblem for what is no tar of samples."""
    files = _list(folder)
    known = _kept(folder, files)
    if known is not None:
        return known
    shards = []
    with ThreadPoolExecutor(_THREADS) as threads:
        for shard in threads.map(lambda name: _read(folder, name), files):
            alive()
            shards.append(shard)
    facts = {"format": _FORMAT, "files": files, "shards": [[s.name, s.members, s.left_out] for s in shards]}
    with contextlib.suppress(OSError):  # a folder that may only be read is indexed anew each time
        write_atomically(folder / INDEX, json.dumps(facts))
    return shards


def _list(folder: Path) -> dict[str, list[int]]:
    """Size in bytes and time of change in ns of each tar."""
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise EnvironmentProblem(f"cannot read the folder {folder}: {error.strerror}; make it readable") from error
    return {path.name: _size_and_time(path) for path in paths if path.suffix == ".tar"}


def _size_and_time(path: Path) -> list[int]:
    try:
        facts = path.stat()
    except OSError as error:
        what = "a link to nothing" if path.is_symlink() else error.strerror
        raise EnvironmentProblem(f"cannot read {path}: {what}; mend it or take it away") from error
    return [facts.st_size, facts.st_mtime_ns]


def _kept(folder: Path, files: dict[str, list[int]]) -> list[Shard] | None:
    try:
        facts = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if facts["format"] != _FORMAT or facts["files"] != files:
            return None
        return [
            Shard(name, [Member(*member) for member in members], Counter(left_out))
            for name, members, left_out in facts["shards"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(folder: Path, name: str) -> Shard:
    path, shard = folder / name, Shard(name)
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for key, members in _samples(tar):
                _add(shard, path, key, members, file.fileno())
    except tarfile.TarError as error:
        raise EnvironmentProblem(f"{path} is no tar file, or not a whole one: {error}; fetch it again") from error
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror or error}; look at the disk") from error
    return shard


def _samples(tar: tarfile.TarFile) -> Iterator[tuple[str, list[tarfile.TarInfo]]]:
    """Neighbours of one name. Only headers are read."""
    key, members = None, list[tarfile.TarInfo]()
    while (info := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # it would keep all of them; the stubs do not name it
        if not info.isfile() or os.path.basename(info.name).startswith("."):  # noqa: PTH119  # a name, no path
            continue
        own = _split(info.name)[0]
        if own != key and key is not None:
            yield key, members
            members = []
        key = own
        members.append(info)
    if key is not None:
        yield key, members


def _split(name: str) -> tuple[str, str]:
    """A member's sample, and what it is of it: `a/b.seg.png` is `seg.png` of `a/b`."""
    folder, slash, own = name.rpartition("/")
    stem, _, extension = own.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


def _add(shard: Shard, path: Path, key: str, members: list[tarfile.TarInfo], descriptor: int) -> None:
    parts = {_split(info.name)[1]: info for info in members}
    images = [info for extension, info in parts.items() if f".{extension}".encode() in SUFFIXES]
    if not images:
        shard.left_out["without an image"] += 1
        return
    if len(images) > 1:
        names = ", ".join(info.name for info in images)
        raise ConfigError(f"{path}: sample {key} has several images ({names}); leave one, named like its label")
    given = next((extension for extension in LABELS if extension in parts), None)
    if given is None:
        raise ConfigError(f"{path}: sample {key} has an image and no {key}.cls or {key}.json with its class; add one")
    info = parts[given]
    text = os.pread(descriptor, info.size, info.offset_data).decode("utf-8", "replace")
    image = images[0]
    shard.members.append(Member(image.name, image.offset_data, image.size, _label(path, info.name, given, text)))


def _label(path: Path, name: str, extension: str, text: str) -> str:
    if extension == "cls":
        label: object = text.strip()
    else:
        try:
            label = json.loads(text)["label"]
        except (ValueError, KeyError, TypeError):
            label = None
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        wanted = "a class's name or number" if extension == "cls" else '{"label": a class\'s name or number}'
        raise ConfigError(f"{path}: {name} holds {text.strip()[:40]!r}, expected {wanted}")
    return str(label)
