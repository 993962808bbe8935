"""A save that fails on one rank fails on all, in one sentence, and the last checkpoint stands."""

import errno
import json
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.errors import EnvironmentProblem
from configs.sections import LaunchConfig
from tests.checkpoints import nothing, rank_of, save, snapshot
from tests.dist.harness import finished, in_ranks, run, tiny_config, wait_for
from trainer import checkpoint, disk, saving
from trainer.peers import PeerError
from trainer.runtime import RunContext
from trainer.saving import Saver


def unexpected(path: Path, fault: str) -> None:
    pytest.fail(f"{path}: {fault}")


LIMIT = 3000  # bytes; the weights below take more, everything else less


def large(context: RunContext, step: int, of_rank: int) -> checkpoint.Snapshot:
    """A snapshot whose own part is large on one rank."""
    small = snapshot(step)
    own = {"buffer/large": torch.zeros(LIMIT if context.rank == of_rank else 1)}
    return checkpoint.Snapshot(step, small.shared, own, small.state | {"world_size": context.world_size})


def limited_save(folder: Path, of_rank: int) -> Callable[[RunContext], tuple[str, str]]:
    """Save step 1; then step 2 under a limit on the size of files that breaks one rank's write; then step 3 without."""

    def function(context: RunContext) -> tuple[str, str]:
        save(context, folder, large(context, 1, of_rank), 9, is_best=False)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
        try:
            save(context, folder, large(context, 2, of_rank), 9, is_best=False)
            told = ("nothing", "")
        except (EnvironmentProblem, PeerError) as error:
            told = (type(error).__name__, str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        context.gather_objects(None)
        after = sorted(path.name for path in folder.iterdir())
        assert after == ["step_00000001"], after
        context.gather_objects(None)
        save(context, folder, large(context, 3, of_rank), 9, is_best=False)
        return told

    return function


@pytest.mark.parametrize("of_rank", [0, 1])
def test_save_that_fails_on_one_rank_raises_on_all_and_leaves_no_half_folder(tmp_path: Path, of_rank: int) -> None:
    folder = tmp_path / "checkpoints"
    told = in_ranks(tmp_path, 2, limited_save(folder, of_rank))
    assert told[of_rank][0] == "EnvironmentProblem"
    assert f"cannot write {folder}/.tmp_step_00000002/rank_{of_rank}.safetensors" in told[of_rank][1]
    assert "File too large" in told[of_rank][1]
    assert "ulimit -f" in told[of_rank][1]
    assert told[1 - of_rank][0] == "PeerError"
    assert f"rank {of_rank} failed: cannot write" in told[1 - of_rank][1]
    assert checkpoint.newest_valid(folder, unexpected) == folder / "step_00000003"


@pytest.mark.parametrize(
    ("rank", "broken"),
    [
        *((0, name) for name in ("_make", "write_tensors", "write_text", "publish", "tidy", "mark_best")),
        *((1, name) for name in ("_make", "write_tensors", "write_atomically")),
    ],
)
def test_failure_of_one_rank_alone_is_told_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, broken: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "some/path")

    def function(context: RunContext) -> str:
        if context.rank == rank:  # in this process only
            monkeypatch.setattr(checkpoint if broken == "mark_best" else saving, broken, fail)
        try:
            save(context, tmp_path, snapshot(1, world_size=2, rank=context.rank), 2, is_best=True)
        except (OSError, EnvironmentProblem, PeerError) as error:
            context.gather_objects(None)  # both are here
            return f"{type(error).__name__}: {error}"
        return "nothing"

    told = in_ranks(tmp_path, 2, function)
    assert told[rank].startswith(("OSError", "EnvironmentProblem"))
    assert "No space left" in told[rank]
    assert told[1 - rank].startswith(f"PeerError: rank {rank} failed:")
    assert not list(tmp_path.glob(".tmp_*"))


def test_run_whose_disk_is_too_small_says_so_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(max_epochs=1)
    finished(tmp_path / "run", config)
    longer = tiny_config(max_epochs=2)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "save_file", fail)
        attempt = run(tmp_path / "run", longer, 2)
    assert attempt.statuses[0] == 3
    assert attempt.outcome().kind == "environment error"
    assert "No space left on device" in (attempt.outcome().message or "")
    assert "run/checkpoints/.tmp_step_00000016/rank_0.safetensors" in (attempt.outcome().message or "")
    assert attempt.checkpoint().name == "step_00000008"
    assert finished(tmp_path / "run", longer, 2).outcome().step == 16


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, world_size: int) -> None:
    """The writers wait for a later step: if training waited for them, neither would ever go on."""
    go = tmp_path / "go"
    config = tiny_config(
        max_epochs=1, checkpoint={"every_steps": 3, "every_epochs": None}, eval__every_epochs=None,
        model={"name": "tests.dist.toys:Touches", "args": {"path": str(go), "at": 4}},
    )  # fmt: skip

    def patient(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        wait_for(go.exists, "a step after the save began")
        disk.write_tensors(path, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_tensors", patient)
        attempt = finished(tmp_path / "run", config, world_size)
    saved = [line for line in attempt.log().splitlines() if line.startswith("saved ")]
    assert saved == ["saved step_00000003", "saved step_00000006", "saved step_00000008"]
    lines = [json.loads(line) for line in attempt.run_dir.metrics.read_text().splitlines()]
    stalls = [line["step"] for line in lines if line.get("perf/checkpoint_stall_s", 0) > 0]
    assert stalls == [4, 7], "logged with the first point after the save"
    assert [step for step, _ in attempt.events("perf/checkpoint_stall_s")] == stalls


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_saved_is_of_the_step_it_says(tmp_path: Path, world_size: int) -> None:
    """Steps that are taken while the writer has not begun change nothing of it."""
    go = tmp_path / "go"
    changes: dict[str, Any] = {"max_epochs": 1, "checkpoint": {"every_steps": 3, "every_epochs": None, "keep": 9}}
    changes |= {"model": {"name": "tests.dist.toys:Touches", "args": {"path": str(go), "at": 5}}}
    config = tiny_config(**changes, optim={"name": "adamw", "lr": 0.1}, ema__half_life_samples=40.0)
    whole = finished(tmp_path / "whole", config, world_size)
    go.unlink()

    def patient(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        wait_for(go.exists, "a step after the save began")
        disk.write_tensors(path, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_tensors", patient)
        slow = finished(tmp_path / "slow", config, world_size)
    for name in ("step_00000003", "step_00000006", "step_00000008"):
        ours, theirs = (checkpoint.load(attempt.run_dir.checkpoints / name) for attempt in (slow, whole))
        for found, wanted in zip(
            [*ours.ranks, *ours.shared.values()], [*theirs.ranks, *theirs.shared.values()], strict=True
        ):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_an_error_lets_the_checkpoint_before_it_arrive(tmp_path: Path) -> None:
    """Rank 1 fails in the step after a save that takes long."""
    failing = {"name": "tests.dist.toys:Raises", "args": {"rank": 1, "step": 3}}
    config = tiny_config(model=failing, checkpoint__every_steps=3)

    def patient(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        wait_for(main_thread_waits, "the error")
        disk.write_tensors(path, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_tensors", patient)
        attempt = run(tmp_path, config, 2)
    assert attempt.statuses == [1, 1]
    assert attempt.outcome(1).message == "boom-731"
    assert attempt.outcome(0).kind == "peer"
    assert attempt.checkpoint().name == "step_00000003"
    assert "saved step_00000003" in attempt.log()


def main_thread_waits() -> bool:
    """Whether this process's training thread has failed and waits for what is on its way."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not Saver.abandon.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_never_comes_is_told_without_a_collective(tmp_path: Path, rank: int) -> None:
    said: list[str] = []
    saver = Saver(rank_of(rank, 2), tmp_path / "checkpoints", 2, LaunchConfig(collective_timeout_s=0.02), said.append)
    saver.save(snapshot(1, world_size=2, rank=rank), is_best=False, before=nothing)
    saver.land()
    assert saver.has_failed is (rank == 0)
    part = tmp_path / "checkpoints" / ".tmp_step_00000001" / "part_1.json"
    assert part.exists() is (rank == 1)
    if rank == 0:
        with pytest.raises(EnvironmentProblem) as caught:
            saver.settle()
        assert str(caught.value).startswith(f"{part} was not written within 0.02 s; the last checkpoint stands; ")
    saver.abandon()
    assert part.parent.exists() is (rank == 1)  # which only rank 0 clears
    assert said == []


def test_what_is_dropped_after_another_error_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "PEER_PATIENCE_S", 0.0)
    said: list[str] = []
    saver = Saver(rank_of(0, 2), tmp_path / "checkpoints", 2, LaunchConfig(collective_timeout_s=60.0), said.append)
    saver.save(snapshot(1, world_size=2), is_best=False, before=nothing)
    saver.abandon()
    assert said == ["dropped step_00000001, which is not complete: the other ranks' parts did not come"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_buffers_are_used_again_and_share_nothing(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": weight, "b": weight, "c": weight.t(), "d": torch.tensor(3)}
    first = saving.copied(tensors, {})
    assert all(torch.equal(first[name], tensor) for name, tensor in tensors.items())
    assert all(tensor.is_contiguous() for tensor in first.values())
    assert len({tensor.data_ptr() for tensor in first.values()}) == 4
    again = saving.copied(tensors | {"d": torch.zeros(5)}, first)
    assert all(again[name] is first[name] for name in "abc")
    assert again["d"].shape == (5,)


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoint_by_the_clock_is_taken_by_all_ranks_at_the_same_step(tmp_path: Path, world_size: int) -> None:
    minutes = {"every_minutes": 1e-9, "every_epochs": None, "keep": 100}
    attempt = finished(tmp_path, tiny_config(checkpoint=minutes, max_epochs=1), world_size)
    assert attempt.checkpoints() == ["best.json", *(f"step_{step:08d}" for step in range(1, 9))]
