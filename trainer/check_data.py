"""`python -m trainer.check_data PLAN PICTURE`: reads every image of a data set before a training does, says what is
wrong with it, and draws what training will see. Exit code 1 if an image is broken, or in both splits."""

import hashlib
import io
import multiprocessing
import os
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from configs.contract import WorkerPlan
from configs.derive import counted
from configs.errors import EXIT_DONE, EXIT_TRAINING, EnvironmentProblem
from configs.schema import RunConfig
from configs.text import printable
from trainer.contact_sheet import draw_samples
from trainer.data.decode import DecodingError, Square, read_pixels
from trainer.data.encoded import Encoded, Splits
from trainer.data.splits import load_splits
from trainer.exits import leave, told
from trainer.parent import die_with_parent

_CHUNK = 16


class Facts(NamedTuple):
    """What reading one image brought; `fault` says why it cannot be."""

    digest: bytes
    size: tuple[int, int]
    """Width and height of the upright image in pixels."""
    fault: str | None


def check(config: RunConfig, picture: Path) -> int:
    """Print the report, draw `picture`; returns the exit code."""
    splits = load_splits(config.data)
    facts = {split: examine_all(files, config.data.channels) for split, files in _by_name(splits).items()}
    lines = [*splits.notes, *_classes(splits), *_sizes(facts), *_twins(splits, facts["train"])]
    faults = [*_broken(splits, facts), *_in_both(splits, facts)]
    for line in (*lines, *faults):
        print(printable(line))
    readable = [index for index, fact in enumerate(facts["train"]) if fact.fault is None]
    if readable:
        draw_samples(splits, config, readable, picture)
        print(f"samples    after augmentation: {printable(str(picture))}")
    total = len(splits.train) + len(splits.evaluation)
    print(f"checked    {counted(total, 'image')}: {counted(len(faults), 'problem') if faults else 'all is well'}")
    return EXIT_TRAINING if faults else EXIT_DONE


def _by_name(splits: Splits) -> dict[str, Encoded]:
    return {"train": splits.train, "val": splits.evaluation}


def examine_all(files: Encoded, channels: int) -> list[Facts]:
    """Read every image, on all cores of this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fork = multiprocessing.get_context("fork")  # torch is imported once
    workers, started = min(cores, len(files)), (files, channels)  # which a fork need not pickle
    with ProcessPoolExecutor(workers, fork, _start_worker, started) as pool:
        found = pool.map(_examine_own, range(len(files)), chunksize=_CHUNK)
        try:
            return list(tqdm(found, total=len(files), unit="image", disable=None, leave=False))
        except BrokenProcessPool as error:
            raise EnvironmentProblem(
                "a process that reads images was killed, usually because memory ran out: give it fewer cores (taskset)"
            ) from error


_mine: list[tuple[Encoded, int]] = []
"""Of a worker: what it examines."""


def _start_worker(files: Encoded, channels: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    _mine.append((files, channels))


def _examine_own(index: int) -> Facts:
    ((files, channels),) = _mine
    return examine(files, index, channels)


def examine(files: Encoded, index: int, channels: int) -> Facts:
    """Decode one image to its end, a large JPEG at an eighth of its size, and keep nothing of it."""
    size = (0, 0)

    def note(width: int, height: int) -> Square:
        nonlocal size
        size = width, height
        return Square((0, 0, width, height), 1)

    try:
        source = files.open(index)
        content = Path(source).read_bytes() if isinstance(source, str) else source.read()
    except OSError as error:
        return Facts(b"", (0, 0), f"cannot be read: {error.strerror}")
    except DecodingError as error:
        return Facts(b"", (0, 0), str(error))
    digest = hashlib.sha256(content).digest()
    try:
        read_pixels(io.BytesIO(content), channels, note)
    except DecodingError as error:
        return Facts(digest, size, str(error))
    return Facts(digest, size, None)


def _classes(splits: Splits) -> list[str]:
    counts = [Counter(files.labels.tolist()) for files in (splits.train, splits.evaluation)]
    width = max(len("class"), *map(len, splits.classes))
    rows = [(name, f"{counts[0][label]:,}", f"{counts[1][label]:,}") for label, name in enumerate(splits.classes)]
    rows = [("class", "train", "val"), *rows, ("all", f"{len(splits.train):,}", f"{len(splits.evaluation):,}")]
    return [f"{name:<{width}}  {train:>9}  {val:>9}" for name, train, val in rows]


def _sizes(facts: dict[str, list[Facts]]) -> list[str]:
    lines = []
    for split, found in facts.items():
        sizes = [fact.size for fact in found if fact.fault is None]
        if sizes:
            width, height = ((min(one), statistics.median_low(one), max(one)) for one in zip(*sizes, strict=True))
            spans = (f"{low:,} to {high:,}, median {middle:,}" for low, middle, high in (width, height))
            lines.append(f"pixels     {split}: width {next(spans)}; height {next(spans)}")
    return lines


def _broken(splits: Splits, facts: dict[str, list[Facts]]) -> list[str]:
    return [
        f"broken     {files.path(index)}: {fact.fault}"
        for split, files in _by_name(splits).items()
        for index, fact in enumerate(facts[split])
        if fact.fault is not None
    ]


def _in_both(splits: Splits, facts: dict[str, list[Facts]]) -> list[str]:
    """Images to evaluate that are trained on too: by content, whatever their names."""
    trained = _by_content(facts["train"])
    return [
        f"in both    {splits.evaluation.path(index)} is {splits.train.path(trained[fact.digest][0])}"
        for index, fact in enumerate(facts["val"])
        if fact.fault is None and fact.digest in trained
    ]


def _twins(splits: Splits, facts: list[Facts]) -> list[str]:
    """Images that are there twice to train on, and worse, with two classes."""
    groups = [group for group in _by_content(facts).values() if len(group) > 1]
    if not groups:
        return []
    torn = [group for group in groups if len(set(splits.train.labels[group].tolist())) > 1]
    lines = [f"note: {counted(sum(map(len, groups)) - len(groups), 'image')} of train are copies of others in it"]
    return lines + [
        f"note: in two classes: {splits.train.path(group[0])} is {splits.train.path(group[-1])}" for group in torn
    ]


def _by_content(facts: Sequence[Facts]) -> dict[bytes, list[int]]:
    groups: dict[bytes, list[int]] = {}
    for index, fact in enumerate(facts):
        if fact.fault is None:
            groups.setdefault(fact.digest, []).append(index)
    return groups


def main(arguments: list[str]) -> int:
    plan = WorkerPlan.load(Path(arguments[0]))
    return told(lambda: check(plan.config, Path(arguments[1])))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
