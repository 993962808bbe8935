"""Checkpoints: complete or absent, every byte hashed, tensors and JSON only, so that loading one can run no code.

`checkpoints/step_00000123/` holds model, optimizer, ema (one file each, written by rank 0), rank_R (what belongs to
rank R alone: running statistics and its share of the logged loss), state.json and, last of all, manifest.json with
sizes and SHA-256. saving.py writes them under another name; when all is on the disk the folder is renamed.
"""

import json
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from configs.contract import write_atomically
from configs.errors import CheckpointError
from configs.run_dir import STEP_FOLDER, step_name
from trainer.disk import in_one_sentence, remove, sha256, sync, write_text
from trainer.strangers import is_plain_name, strangeness_of

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
ASIDE, OLD = ".tmp_", ".old_"
"""Before the name of a checkpoint: one that is being written or deleted, and one that is being replaced."""
BEST = "best.json"
_FILE = re.compile(r"[a-z0-9_]+\.(safetensors|json)", re.ASCII)

PART = "part_*.json"
"""While it is written: the facts of each rank's files but rank 0's."""

Tensors = dict[str, Tensor]
Facts = dict[str, dict[str, Any]]
"""Of each file of a checkpoint: bytes and sha256."""
Damage = Callable[[Path, str], None]
"""Told of each checkpoint that cannot be used, and why."""


@dataclass(frozen=True)
class Snapshot:
    """What one rank puts into a checkpoint. `shared` is the same on all
    ranks and written by rank 0: file stem to tensors."""

    step: int
    shared: dict[str, Tensors]
    own: Tensors
    state: dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A valid checkpoint: tensors on the CPU; `ranks` is indexed by the rank that saved."""

    name: str
    shared: dict[str, Tensors]
    ranks: list[Tensors]
    state: dict[str, Any]


def rank_file(rank: int) -> str:
    """Name of the file with what belongs to `rank` alone."""
    return f"rank_{rank}.safetensors"


def step_folders(folder: Path) -> list[Path]:
    """Published checkpoints, oldest first; a name that only resembles one is none."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := STEP_FOLDER.fullmatch(path.name))]
    return [path for step, path in sorted(found) if path.name == step_name(step)]


def recover(folder: Path, skipped: Damage) -> None:
    """Clear what a kill left behind: half a checkpoint that was being written or deleted, and one that was being
    replaced by another of the same step. By one process only, while nobody saves."""
    for leftover in (*folder.glob(f"{ASIDE}*step_*"), *folder.glob(f".{BEST}.*.tmp")):
        remove(leftover)
    for old in folder.glob(f"{OLD}step_*"):
        final = folder / old.name.removeprefix(OLD)
        fault = fault_of(final) if final.exists() else None
        if fault is not None:
            skipped(final, fault)
            set_aside(final)
        if final.exists():
            remove(old)
        else:
            old.rename(final)


def publish(aside: Path, final: Path, files: Facts) -> None:
    """Make the checkpoint in `aside`, whose files all lie on the disk, the one that is called `final`."""
    with in_one_sentence("write", final):
        for part in sorted(aside.glob(PART)):
            files = files | json.loads(part.read_text(encoding="utf-8"))
            part.unlink()
        write_text(aside / MANIFEST, json.dumps(files, indent=1))
        sync(aside)
        old = final.with_name(OLD + final.name)
        if final.exists():  # the same step again: after a stop that put off what was due, or a resume from an older one
            final.rename(old)
        aside.rename(final)
        sync(final.parent)
        remove(old)


def tidy(final: Path, keep: int, *, is_best: bool) -> None:
    """Of the checkpoints up to `final`, which is on the disk, keep the newest `keep` and the best. What is newer is
    not judged here."""
    if is_best:
        with in_one_sentence("write", final.parent / BEST):
            mark_best(final.parent, final.name)
    best, found = best_name(final.parent), step_folders(final.parent)
    for path in found[: found.index(final) + 1][:-keep]:
        if path.name != best:
            with in_one_sentence("delete", path):
                # Renamed first: half deleted, it would be taken for a damaged one.
                remove(path.rename(path.with_name(f"{ASIDE}old_{path.name}")))


def mark_best(folder: Path, name: str) -> None:
    """Have best.json name the checkpoint that evaluated best."""
    if best_name(folder) != name:
        write_atomically(folder / BEST, json.dumps({"name": name}))


def best_name(folder: Path) -> str | None:
    """Name of the checkpoint that evaluated best, if there is one; it may be missing."""
    try:
        name = json.loads((folder / BEST).read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) and STEP_FOLDER.fullmatch(name) else None


def fault_of(path: Path) -> str | None:
    """Why the checkpoint `path` cannot be used; None if every byte is as it was written."""
    if not path.is_dir():
        return "it is no folder"
    place = MANIFEST
    try:
        if strange := strangeness_of(path):
            return strange
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, facts in manifest.items():
            if not is_plain_name(name):
                return f"{MANIFEST} lists {name!r}, which is no file of a checkpoint"
            if fault := _file_fault(path, name, facts["bytes"], facts["sha256"]):
                return fault
        if STATE not in manifest:
            return f"{MANIFEST} does not list {STATE}"
        place = STATE
        world_size = json.loads((path / STATE).read_text(encoding="utf-8"))["world_size"]
        if world_size < 1:
            return f"{STATE} says that {world_size} ranks saved it"
        unlisted = next((rank for rank in range(world_size) if rank_file(rank) not in manifest), None)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        return f"{place} is not readable: {type(error).__name__}: {error}"
    return None if unlisted is None else f"{MANIFEST} does not list {rank_file(unlisted)} of {world_size} ranks"


def _file_fault(path: Path, name: str, num_bytes: int, digest: str) -> str | None:
    """What is wrong with one file of the checkpoint `path`. A manifest can name none outside of it, nor a device."""
    if not _FILE.fullmatch(name):
        return f"{MANIFEST} lists {name!r}, which is no file of a checkpoint"
    facts = (path / name).stat()
    if not stat.S_ISREG(facts.st_mode):
        return f"{name} is no file"
    if facts.st_size != num_bytes:
        return f"{name} has {facts.st_size:,} of {num_bytes:,} bytes"
    return None if sha256(path / name) == digest else f"{name} is not what was written (its SHA-256 differs)"


def newest_valid(folder: Path, skipped: Damage) -> Path | None:
    """The newest checkpoint without a fault; each newer one that has one is told to `skipped`, with its fault."""
    for path in reversed(step_folders(folder)):
        fault = fault_of(path)
        if fault is None:
            return path
        skipped(path, fault)
    return None


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither counted as one to keep nor in the way of the next."""
    aside = path.with_name(f"damaged_{path.name}")
    remove(aside)
    return path.rename(aside)


def load(path: Path) -> Loaded:
    """Read a checkpoint that fault_of() found good; nothing but what its manifest lists.
    Raises CheckpointError if it is of another format."""
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {state.get('format')} and this version reads format {FORMAT}; "
            "go on with the version that wrote it"
        )
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    try:
        files = {Path(name).stem: load_file(path / name) for name in manifest if name.endswith(".safetensors")}
    except Exception as error:  # the hashes are right: something else made it like this
        raise CheckpointError(f"{path} holds what is no safetensors file: {error}; use another checkpoint") from error
    ranks = [files.pop(f"rank_{rank}") for rank in range(state["world_size"])]
    return Loaded(path.name, files, ranks, state)


def merged_own(loaded: Loaded, rank: int, world_size: int, summed: tuple[str, ...], *, alike: bool = False) -> Tensors:
    """What belonged to each rank, for `rank` of `world_size`.

    On the same world size it is as it was; on another, or where all must be `alike`, the average of the floating
    tensors and the integers of rank 0. Tensors named in `summed` are sums over ranks: there rank 0 gets all of it.
    Raises CheckpointError where virtual shards had kept the ranks equal, and they are not.
    """
    if len(loaded.ranks) == world_size and not alike:
        return loaded.ranks[rank]
    merged = {}
    for name, first in loaded.ranks[0].items():
        stacked = torch.stack([own[name] for own in loaded.ranks])
        if name not in summed and loaded.state.get("virtual_shards") and not _same_bits(stacked):
            raise CheckpointError(
                f"{loaded.name}: {name} differs between its ranks, which virtual_shards had kept equal, so one of them "
                "computed wrongly; use an earlier checkpoint, and look at the machine"
            )
        if name in summed:
            merged[name] = stacked.sum(0) if rank == 0 else torch.zeros_like(first)
        else:
            # The mean of equal values may be off by a bit.
            differs = first.is_floating_point() and bool((stacked != first).any())
            merged[name] = stacked.mean(0) if differs else first
    return merged


def _same_bits(stacked: Tensor) -> bool:
    """Whether all are as the first; unlike `==` on numbers this takes NaN for itself, and 0 not for -0."""
    rows = stacked.reshape(len(stacked), -1).view(torch.uint8)
    return bool((rows == rows[0]).all())


def check_fits(wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], path: Path) -> None:
    """Raise CheckpointError naming at most five tensors if the checkpoint `path` is of another architecture."""
    lines = [f"{name}: the model has no such tensor" for name in sorted(found.keys() - wanted.keys())]
    lines += [f"{name}: the checkpoint has no such tensor" for name in sorted(wanted.keys() - found.keys())]
    lines += [
        f"{name}: {list(found[name])} in the checkpoint, {list(wanted[name])} in the model"
        for name in sorted(wanted.keys() & found.keys())
        if wanted[name] != found[name]
    ]
    if lines:
        more = f" (and {len(lines) - 5} more)" if len(lines) > 5 else ""
        raise CheckpointError(
            f"{path} is of another architecture: {'; '.join(lines[:5])}{more}; use the model it was saved with"
        )
