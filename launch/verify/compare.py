"""What is equal in two runs, and what is not, in words."""

import hashlib
from pathlib import Path
from typing import Any

from configs.derive import counted
from launch.verify.runs import Ended

CLOCKS = ("wall_s", "versions", "config", "time", "metrics_bytes", "world_size")
"""Of a checkpoint's state.json: measured, or different on purpose."""


def bits(one: Ended, other: Ended) -> list[str]:
    """Differences in the bits of the last checkpoint, the exported weights, the metrics and the samples.

    Of two numbers of processes the files are compared that both have.
    """
    more = sorted(other.samples()[0].keys() - one.samples()[0].keys())
    extra = [f"batch {more[0]} was trained on in one run only"] if more else []
    return [*checkpoints(one, other), *exports(one, other), *metrics(one, other), *samples(one, other), *extra]


def checkpoints(one: Ended, other: Ended) -> list[str]:
    first, second = one.checkpoint, other.checkpoint
    if first is None or second is None or first.name != second.name:
        return [f"the last checkpoint is {_name(first)} and {_name(second)}"]
    sets = [{path.name for path in folder.glob("*.safetensors")} for folder in (first, second)]
    same_ranks = one.state().get("world_size") == other.state().get("world_size")
    names = sorted(sets[0] | sets[1] if same_ranks else sets[0] & sets[1])
    differing = [name for name in names if _digest(first / name) != _digest(second / name)]
    left, right = _comparable(one.state()), _comparable(other.state())
    keys = [key for key in left.keys() | right.keys() if left.get(key) != right.get(key)]
    return (
        [f"{first.name}/{name} differs" for name in differing]
        + [*_unlike_ranks(one), *_unlike_ranks(other)]
        + [f"state.json: {key} differs" for key in sorted(keys)]
    )


def _unlike_ranks(ended: Ended) -> list[str]:
    """Under virtual shards all ranks hold the same, but for their shares of the loss that is not logged yet."""
    assert ended.checkpoint is not None
    if not ended.state().get("virtual_shards"):
        return []
    first, *others = sorted(ended.checkpoint.glob("rank_*.safetensors"), key=lambda path: int(path.stem.split("_")[1]))
    expected = _bytes_of(first)
    return [
        f"{ended.checkpoint.name}/{path.name}: {name} is not that of {first.name}"
        for path in others
        for name, content in _bytes_of(path).items()
        if name != "window" and content != expected[name]
    ]


def _bytes_of(path: Path) -> dict[str, bytes]:
    """By tensor; numpy lacks some of their types."""
    from safetensors import deserialize

    return {name: tensor["data"] for name, tensor in deserialize(path.read_bytes())}  # type: ignore[no-untyped-call]


def exports(one: Ended, other: Ended) -> list[str]:
    same = _digest(one.run.weights) == _digest(other.run.weights)
    return [] if same else ["model.safetensors differs"]


def metrics(one: Ended, other: Ended) -> list[str]:
    left, right = one.metrics(), other.metrics()
    if left == right:
        return []
    for first, second in zip(left, right, strict=False):
        if first != second:
            key = next(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
            return [f"metrics.jsonl: {key} at step {first['step']} is {first.get(key)} and {second.get(key)}"]
    return [f"metrics.jsonl has {len(left)} and {len(right)} points"]


def samples(one: Ended, other: Ended) -> list[str]:
    """The samples of each of `one`'s batches, and that no replay had other ones."""
    (left, replayed), (right, replayed_too) = one.samples(), other.samples()
    if replayed or replayed_too:
        return [f"batch {(replayed or replayed_too)[0]} had other samples when it was replayed"]
    differing = [batch for batch in sorted(left) if left[batch] != right.get(batch)]
    return [f"the samples of batch {differing[0]} differ"] if differing else []


def distances(one: Ended, other: Ended) -> dict[str, float]:
    """Largest absolute difference in each tensor of the exported weights; infinite where one has no such tensor."""
    # Without torch, which the launcher never imports.
    from safetensors.numpy import load_file

    left, right = load_file(one.run.weights), load_file(other.run.weights)
    missing = dict.fromkeys(left.keys() ^ right.keys(), float("inf"))
    shared = left.keys() & right.keys()
    return missing | {name: float(abs(left[name] - right[name]).max(initial=0)) for name in sorted(shared)}


def describe(ended: Ended) -> str:
    """What was compared, with its numbers."""
    folder = ended.checkpoint
    files = [] if folder is None else sorted(path.stem for path in folder.glob("*.safetensors"))
    points, batches = counted(len(ended.metrics()), "point"), counted(len(ended.samples()[0]), "batch")
    return f"{', '.join(files)}; {points} of metrics; the samples of {batches}"


def _comparable(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in CLOCKS}


def _name(path: Path | None) -> str:
    return "missing" if path is None else path.name


def _digest(path: Path) -> str | None:
    if not path.exists():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
