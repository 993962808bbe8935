"""A checkpoint may come from a stranger, who can make its hashes right. At worst it is an error: no file outside of its
folder is read or written, nothing is taken for what it is not, and nothing is allocated on its word alone."""

import math
import re
import stat
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from configs.errors import CheckpointError
from trainer.state import TrainState

_NAME = re.compile(r"[a-z0-9_]+\.(safetensors|json)", re.ASCII)
_MAX_JSON_BYTES = 64 * 2**20
_MAX_INT = 2**53  # more steps or seconds than there will be; TensorBoard ends at 2**63
_TYPES: dict[str, Any] = {
    "world_size": int,
    "device": str,
    "gpu": str | None,
    "cudnn": int | None,
    "processor": str | None,
    "cpu_capability": str | None,
    "precision": str,
    "channels_last": bool | None,
    "compile": bool | None,
    "threads_per_rank": int | None,
    "virtual_shards": int,
    "micro_batch": int | None,
    "decoder": str | None,
    "teacher": str | None,
    "versions": dict[str, str],
    "versions.torch": str,
    "time": dict[str, float],
    "wall_s": float,
    "grad_norm": float | None,
    "scaler": dict | None,
    "metrics_bytes": int,
    "files": dict[str, str] | None,
    "train_state": dict,
}


def strangeness_of(path: Path) -> str | None:
    """What in the checkpoint folder `path` is no plain file with a name of a checkpoint's file; None if nothing."""
    if not path.is_dir():
        return "it is no folder"
    for file in path.iterdir():
        facts = file.lstat()
        if not stat.S_ISREG(facts.st_mode) or not _NAME.fullmatch(file.name):
            return f"{file.name!r} is no file of a checkpoint"
        if file.suffix == ".json" and facts.st_size > _MAX_JSON_BYTES:
            return f"{file.name} has {facts.st_size:,} bytes"
    return None


def is_plain_name(name: str) -> bool:
    """Whether a manifest may list this: no path, no hidden file."""
    return _NAME.fullmatch(name) is not None


def check_state(state: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if state.json holds something that the trainer did not write."""
    found = {name: state.get(name) for name in _TYPES}
    if isinstance(found["grad_norm"], float):
        found["grad_norm"] = 0.0  # that of an fp16 overflow is infinite
    found["versions.torch"] = found["versions"].get("torch") if isinstance(found["versions"], dict) else None
    wanted = dict(_TYPES)
    train_state = found["train_state"] if isinstance(found["train_state"], dict) else {}
    hints = get_type_hints(TrainState)
    found |= {f"train_state.{name}": value for name, value in train_state.items()}
    wanted |= {f"train_state.{name}": hint for name, hint in hints.items() if name in train_state}
    for name, value in found.items():
        if name not in wanted or not _is_a(value, wanted[name]):
            raise CheckpointError(f"{path}: state.json has {name}: {value!r:.60}, which no run has written")
    batch, step, skipped = (train_state.get(name, 0) for name in ("batch", "step", "skipped"))
    counters = (
        batch,
        step,
        skipped,
        *(train_state.get(name, 0) for name in ("epoch", "batch_in_epoch", "samples_seen")),
    )
    if batch != step + skipped or min(counters) < 0 or state["world_size"] < 1:
        raise CheckpointError(f"{path}: state.json counts {batch} batches, {step} steps and {skipped} skipped ones")


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of this type; a whole number is a float too. Other types than JSON's are not judged."""
    if get_origin(kind) in (Union, types.UnionType):
        return any(_is_a(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_a(one, get_args(kind)[0]) for one in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is_a(one, get_args(kind)[1]) for one in value.values())
    if kind is int:
        return type(value) is int and abs(value) < _MAX_INT
    if kind is float:
        return (type(value) is float and math.isfinite(value)) or _is_a(value, int)
    return not isinstance(kind, type) or isinstance(value, kind)
