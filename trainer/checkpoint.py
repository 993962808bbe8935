"""Checkpoints: complete or absent, every byte hashed, tensors and JSON only, so that loading one can run no code.

`checkpoints/step_00000123/` holds model, optimizer, ema (one file each, written by rank 0), rank_R (what belongs to
rank R alone: running statistics and its share of the logged loss), state.json and, last of all, manifest.json with
sizes and SHA-256. The folder is written under another name and renamed when everything is on the disk.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.contract import write_atomically
from configs.errors import CheckpointError, EnvironmentProblem
from configs.run_dir import STEP_FOLDER, step_name
from trainer.runtime import RunContext
from trainer.strangers import is_plain_name, strangeness_of

FORMAT = 1
MANIFEST = "manifest.json"
_BEST = "best.json"
_OLD = ".old_"
_FIXES = {
    "File too large": "raise `ulimit -f`",
    "Permission denied": "make the folder writable",
    "Read-only file system": "make the folder writable",
}

Tensors = dict[str, Tensor]


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


def step_folders(folder: Path) -> list[Path]:
    """Published checkpoints, oldest first; a name that only resembles one is none."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := STEP_FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def save(context: RunContext, folder: Path, snapshot: Snapshot, keep: int, *, is_best: bool) -> Path:
    """Write, publish, then delete all but the `keep` newest. Called by all ranks; what fails on one raises on all."""
    final = folder / step_name(snapshot.step)
    aside = folder / f".tmp_{final.name}"
    context.together(lambda: _open_aside(aside) if context.is_rank_zero else None)
    with _no_half_folder(context, aside):
        context.together(lambda: write_tensors(aside / f"rank_{context.rank}.safetensors", snapshot.own))
        context.together(lambda: _publish(aside, final, snapshot) if context.is_rank_zero else None)
    context.together(lambda: _tidy(final, keep, is_best=is_best) if context.is_rank_zero else None)
    return final


@contextlib.contextmanager
def _no_half_folder(context: RunContext, aside: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if context.is_rank_zero:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _open_aside(aside: Path) -> None:
    """Make the folder to write in; what a killed save left behind goes first."""
    for leftover in aside.parent.glob(".tmp_step_*"):
        shutil.rmtree(leftover)
    recover(aside.parent)
    aside.mkdir(parents=True)


def recover(folder: Path) -> None:
    """Finish what a kill cut short while a checkpoint was replaced by one of the same step. By one process only."""
    for old in folder.glob(f"{_OLD}step_*"):
        final = folder / old.name.removeprefix(_OLD)
        if final.exists():
            shutil.rmtree(old)
        else:
            old.rename(final)


def _publish(aside: Path, final: Path, snapshot: Snapshot) -> None:
    for stem, tensors in snapshot.shared.items():
        write_tensors(aside / f"{stem}.safetensors", tensors)
    state = json.dumps(snapshot.state | {"format": FORMAT}, indent=1)
    _on_disk(aside / "state.json", lambda: (aside / "state.json").write_text(state, encoding="utf-8"))
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(aside.iterdir())}
    _on_disk(aside / MANIFEST, lambda: (aside / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8"))
    sync(aside)
    old = final.with_name(_OLD + final.name)
    if final.exists():  # the same step again: after a stop that put off what was due, or a resume from an older one
        final.rename(old)
    aside.rename(final)
    sync(final.parent)
    if old.exists():
        shutil.rmtree(old)


def write_tensors(path: Path, tensors: Tensors) -> None:
    """A safetensors file that is on the disk when this returns. Raises EnvironmentProblem."""
    # Clones: two names may share memory (a module used twice, a buffer that is a view), which safetensors refuses.
    plain = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    _on_disk(path, lambda: save_file(plain, path))


def _on_disk(path: Path, write: Callable[[], object]) -> None:
    """Write and fsync; a full disk, a quota or a read-only folder becomes one sentence with the path."""
    try:
        write()
        sync(path)
    except Exception as error:  # safetensors wraps an OSError in its own class
        if not isinstance(error, OSError) and "I/O error" not in str(error) and "Io" not in str(error):
            raise
        free = shutil.disk_usage(path.parent).free
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        fix = next((fix for sign, fix in _FIXES.items() if sign in reason), "free some space")
        raise EnvironmentProblem(
            f"cannot write {path}: {reason} ({free:,} bytes free); the last checkpoint stands; {fix}"
        ) from error


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tidy(final: Path, keep: int, *, is_best: bool) -> None:
    if is_best:
        write_atomically(final.parent / _BEST, json.dumps({"name": final.name}))
    _delete_old(final, keep)


def _delete_old(final: Path, keep: int) -> None:
    """Of the checkpoints up to `final` keep the newest `keep` and the best; what is newer is not judged here."""
    best, found = best_name(final.parent), step_folders(final.parent)
    for path in found[: found.index(final) + 1][:-keep]:
        if path.name != best:
            shutil.rmtree(path)


def best_name(folder: Path) -> str | None:
    """Name of the checkpoint that evaluated best, if there is one."""
    try:
        name = json.loads((folder / _BEST).read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) and STEP_FOLDER.fullmatch(name) else None


def fault_of(path: Path) -> str | None:
    """Why the checkpoint `path` cannot be used; None if every byte is as it was written."""
    try:
        if strange := strangeness_of(path):
            return strange
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if "state.json" not in manifest:
            return f"{MANIFEST} does not list state.json"
        for name, facts in manifest.items():
            if not is_plain_name(name):
                return f"{MANIFEST} lists {name!r}, which is no file of a checkpoint"
            size = (path / name).stat().st_size
            if size != facts["bytes"]:
                return f"{name} has {size:,} of {facts['bytes']:,} bytes"
            if _sha256(path / name) != facts["sha256"]:
                return f"{name} is not what was written (its SHA-256 differs)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        return f"{MANIFEST} is not readable: {error}"
    return None


def newest_valid(folder: Path, skipped: Callable[[Path, str], None]) -> Path | None:
    """The newest checkpoint without a fault; each newer one that has one is told to `skipped`, with its fault."""
    for path in reversed(step_folders(folder)):
        fault = fault_of(path)
        if fault is None:
            return path
        skipped(path, fault)
    return None


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that it is neither counted as one to keep nor in the way of the next."""
    aside = path.with_name(f"damaged_{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)


def load(path: Path) -> Loaded:
    """Read a checkpoint that fault_of() found good. Raises CheckpointError if its format is not this version's."""
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {state.get('format')} and this version reads format {FORMAT}")
    stems = {file.stem for file in path.glob("*.safetensors")}
    ranks = [load_file(path / f"rank_{rank}.safetensors") for rank in range(state["world_size"])]
    shared = {stem: load_file(path / f"{stem}.safetensors") for stem in stems if not stem.startswith("rank_")}
    return Loaded(path.name, shared, ranks, state)


def merged_own(loaded: Loaded, rank: int, world_size: int, summed: tuple[str, ...]) -> Tensors:
    """What belonged to each rank, for `rank` of `world_size`.

    On the same world size it is as it was; on another the average of the floating tensors and the integers of rank 0.
    Tensors named in `summed` are sums over ranks: there rank 0 gets all of it.
    """
    if len(loaded.ranks) == world_size:
        return loaded.ranks[rank]
    merged = {}
    for name, first in loaded.ranks[0].items():
        stacked = torch.stack([own[name] for own in loaded.ranks])
        if name in summed:
            merged[name] = stacked.sum(0) if rank == 0 else torch.zeros_like(first)
        else:
            merged[name] = stacked.mean(0) if first.is_floating_point() else first
    return merged


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
