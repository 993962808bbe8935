"""Killed at every write boundary of a save, one after the other: the newest valid checkpoint is the old or the new one.

A boundary is just before a process makes, opens, flushes, renames or removes anything in the folder, and the middle of
a file of tensors. Each is tried in forked processes of its own, until a save gets through.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tests.checkpoints import alone, nothing, rank_of, save, saver_of, snapshot
from tests.dist.harness import exit_statuses, fork, wait_for
from trainer import checkpoint, disk, saving
from trainer.checkpoint import fault_of, newest_valid, step_folders

TOUCHES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
Touched = Callable[[str, str], None]


def watch(folder: Path, touched: Touched) -> None:
    """Have `touched` called with (event, path) before this process does anything to a file in `folder`."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in TOUCHES:
            path = str(arguments[0])
            # What is removed within a folder is told relative to it.
            if path.startswith(str(folder)) or event in ("os.remove", "os.rmdir"):
                touched(event, path)

    def fsync(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if path.startswith(str(folder)):
            touched("fsync", path)
        real_fsync(descriptor)

    def save_file(tensors: dict[str, Any], path: Path) -> None:
        content = safetensors.torch.save(tensors)
        path.write_bytes(content[: len(content) // 2])
        touched("half written", str(path))
        path.write_bytes(content)
        touched("written", str(path))

    real_fsync = os.fsync
    os.fsync, disk.save_file = fsync, save_file
    sys.addaudithook(hook)


def die_at_touch(number: int, folder: Path) -> None:
    """Have this process killed at its `number`-th touch of `folder`."""
    left = [number]

    def touched(_event: str, _path: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(folder, touched)


def unexpected(path: Path, fault: str) -> None:
    pytest.fail(f"{path}: {fault}")


def value_of(path: Path) -> float:
    return float(checkpoint.load(path).shared["model"]["w"][0, 0])


def save_and_say(folder: Path, step: int, said: Path) -> None:
    """Save `step` as the best, by one process, and append what is announced to the file `said`."""
    saver = saver_of(alone(), folder, keep=2)
    saver._announce = lambda text: said.open("a", encoding="utf-8").write(text + "\n") and None
    saver.save(snapshot(step, 9.0), is_best=True, before=nothing)
    saver.settle()


def assert_sound(folder: Path, before: list[int], step: int, said: Path) -> bool:
    """What must hold after a kill in a save of `step`, before and after the next start, and after its first save.
    Returns whether the new one is there."""
    announced = said.exists()
    # Readers come in between: an evaluation of a run that goes on.
    newest = newest_valid(folder, unexpected)
    assert newest is not None
    is_published = value_of(newest) == 9.0
    assert is_published or not announced
    checkpoint.recover(folder, unexpected)
    newest = newest_valid(folder, unexpected)
    assert newest is not None
    assert newest.name == f"step_{(step if is_published else before[-1]):08d}"
    good = [path for path in step_folders(folder) if fault_of(path) is None]
    assert good == step_folders(folder)
    assert len(good) >= min(2, len(before))
    assert {path.name for path in folder.iterdir()} == {path.name for path in good} | {"best.json"}
    assert checkpoint.best_name(folder) in {path.name for path in good}
    save(alone(), folder, snapshot(step + 1), 2)
    kept = [path.name for path in step_folders(folder)]
    assert kept[-2:] == [newest.name, f"step_{step + 1:08d}"]
    assert set(kept[:-2]) <= {checkpoint.best_name(folder)}
    return is_published


def fresh(folder: Path, steps: list[int]) -> Path:
    """A folder with checkpoints of these steps; the first is the best."""
    shutil.rmtree(folder, ignore_errors=True)
    for step in steps:
        save(alone(), folder, snapshot(step), is_best=step == steps[0])
    return folder


@pytest.mark.parametrize(("before", "step"), [([1], 2), ([1, 2, 3], 4), ([1, 2], 2), ([1], 1)], ids=str)
def test_one_process(tmp_path: Path, before: list[int], step: int) -> None:
    """A new step, with old ones to delete; the same step again; the only one again."""
    folder, said = tmp_path / "checkpoints", tmp_path / "said"
    published = []
    for number in range(1, 200):
        fresh(folder, before)
        said.unlink(missing_ok=True)

        def body(number: int = number) -> int:
            die_at_touch(number, folder)
            save_and_say(folder, step, said)
            return 0

        (status,) = exit_statuses([fork(body)])
        if step == before[0] == before[-1] and newest_valid(folder, unexpected) is None:
            checkpoint.recover(folder, unexpected)  # while it is replaced, only the next start finds it
        published.append(assert_sound(folder, before, step, said))
        if status == 0:
            break
        assert status == -signal.SIGKILL
    else:
        raise AssertionError("no save got through")
    assert len(published) > 25
    print(f"{len(published)} boundaries")
    assert published == sorted(published), "once it is published it stays"
    assert published[0] is False
    assert published[-1] is True


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks(tmp_path: Path, victim: int) -> None:
    folder = tmp_path / "checkpoints"
    published = []
    for number in range(1, 200):
        shutil.rmtree(folder, ignore_errors=True)
        two_ranks(folder, 1, 0.5, tmp_path / f"gone-{number}-1", None, 0)
        gone = tmp_path / f"gone-{number}-2"
        status = two_ranks(folder, 2, 9.0, gone, victim, number)
        part = folder / ".tmp_step_00000002" / "part_1.json"
        newest = newest_valid(folder, unexpected)
        assert newest is not None
        is_published = newest.name == "step_00000002"
        if victim == 1:  # rank 0 is there to the end: it publishes what it can and clears away what not
            assert not part.parent.exists()
        checkpoint.recover(folder, unexpected)
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
        assert newest_valid(folder, unexpected) == newest
        loaded = checkpoint.load(newest)
        value = 9.0 if is_published else 0.5
        assert value_of(newest) == value
        assert [float(own["buffer/mean"]) for own in loaded.ranks] == [value, value + 1]
        published.append(is_published)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    else:
        raise AssertionError("no save got through")
    assert len(published) > (25 if victim == 0 else 9)
    print(f"{len(published)} boundaries")
    assert published == sorted(published)
    assert published[-1] is True
    assert published.count(True) >= 2, "a rank killed after its part was complete took the checkpoint with it"


def two_ranks(folder: Path, step: int, value: float, gone: Path, victim: int | None, number: int) -> int:
    """One save by two processes, of which `victim` is killed at its `number`-th touch. Without a process group: no
    rank can enter a collective. Returns the victim's status; of none, 0."""

    def body(rank: int) -> int:
        if rank == victim:
            die_at_touch(number, folder)
        saver = saver_of(rank_of(rank, 2), folder)
        saver.save(snapshot(step, value, world_size=2, rank=rank), is_best=False, before=nothing)
        if rank == 0 and victim == 1:
            wait_for(gone.exists, "the end of rank 1")
            saving.PEER_PATIENCE_S = 0.0
        else:
            saving.PEER_PATIENCE_S = 60.0  # the other one is alive
        saver.abandon()
        return 0

    pids = [fork(lambda rank=rank: body(rank)) for rank in range(2)]
    (last,) = exit_statuses(pids[1:])
    gone.touch()
    (first,) = exit_statuses(pids[:1])
    statuses = [first, last]
    if victim is None:
        assert statuses == [0, 0]
        return 0
    assert statuses[1 - victim] == 0
    return statuses[victim]


def test_everything_is_on_the_disk_before_it_is_published(tmp_path: Path) -> None:
    """The order that a power cut asks for: each file after its last write and the folder, then the rename, then the
    folder around it; only then something is announced, and only then the old ones go."""
    folder, log = fresh(tmp_path / "checkpoints", [1, 2, 3]), tmp_path / "log"

    def body() -> int:
        with log.open("a", encoding="utf-8", buffering=1) as file:
            watch(folder, lambda event, path: file.write(f"{event} {path}\n") and None)
            saver = saver_of(alone(), folder, keep=2)
            saver._announce = lambda text: file.write(text + "\n") and None
            saver.save(snapshot(4), is_best=False, before=lambda: file.write("before\n") and None)
            saver.settle()
        return 0

    assert exit_statuses([fork(body)]) == [0]
    lines = log.read_text(encoding="utf-8").splitlines()
    aside, rename = f"{folder}/.tmp_step_00000004", lines.index(f"os.rename {folder}/.tmp_step_00000004")
    files = {path.name for path in (folder / "step_00000004").iterdir()}
    assert files == {"manifest.json", "state.json", *(f"{n}.safetensors" for n in ("model", "optimizer", "rank_0"))}
    for name in files:
        flushed = lines.index(f"fsync {aside}/{name}")
        assert flushed < rename
        assert not [line for line in lines[flushed:] if line == f"written {aside}/{name}"]
    assert lines[rename - 1] == f"fsync {aside}"
    assert lines.index("before") < rename
    around = lines.index(f"fsync {folder}")
    assert rename < around < lines.index("saved step_00000004")
    removals = [index for index, line in enumerate(lines) if line.startswith(("os.remove", "os.rmdir", "shutil"))]
    assert min(removals) > around
    manifest = lines.index(f"fsync {aside}/manifest.json")
    assert manifest == max(lines.index(f"fsync {aside}/{name}") for name in files)
