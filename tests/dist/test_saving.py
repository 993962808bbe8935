"""A checkpoint is complete or absent, whatever happens while it is written."""

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.errors import EnvironmentProblem
from tests.dist.harness import exit_statuses, finished, fork, in_ranks, run, tiny_config
from tests.unit.test_checkpoint import alone, snapshot
from trainer import checkpoint
from trainer.peers import PeerError
from trainer.runtime import RunContext


def die_at_event(number: int, folder: Path) -> None:
    """Kill this process at the `number`-th thing that it does to a file in `folder`: open, rename, remove, make."""
    left = [number]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        touches = event in ("open", "os.rename", "os.mkdir", "shutil.rmtree")
        touches = touches and any(str(argument).startswith(str(folder)) for argument in arguments)
        if touches or event in ("os.remove", "os.rmdir"):  # these are told relative to an open folder
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def crash_points(folder: Path, save: Callable[[], object]) -> int:
    """Run `save` in forked processes that are killed at their first, second, ... touch of `folder`, until one gets
    through; after each, a whole checkpoint must be there. Returns how often it was killed."""
    for number in range(1, 200):

        def body(number: int = number) -> int:
            die_at_event(number, folder)
            save()
            return 0

        (status,) = exit_statuses([fork(body)])
        checkpoint.recover(folder)
        newest = checkpoint.newest_valid(folder, unexpected)
        assert newest is not None, f"nothing is left after touch {number}"
        value = float(checkpoint.load(newest).shared["model"]["w"][0, 0])
        assert (newest.name, value) in ((NEW if status == 0 else OLD), NEW)
        if status == 0:
            return number - 1
        assert status == -signal.SIGKILL
    raise AssertionError("save never got through")


OLD, NEW = ("step_00000001", 0.5), ("step_00000002", 2.5)


def test_killed_at_any_moment_of_a_save(tmp_path: Path) -> None:
    checkpoint.save(alone(), tmp_path, snapshot(1), 2, is_best=True)
    kills = crash_points(tmp_path, lambda: checkpoint.save(alone(), tmp_path, snapshot(2, 2.5), 2, is_best=False))
    assert kills > 15
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "step_00000001", "step_00000002"]


def test_killed_at_any_moment_of_saving_the_only_checkpoint_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after a stop just before what was due at that step.
    monkeypatch.setattr(sys.modules[__name__], "NEW", ("step_00000001", 2.5))
    checkpoint.save(alone(), tmp_path, snapshot(1), 2, is_best=False)
    kills = crash_points(tmp_path, lambda: checkpoint.save(alone(), tmp_path, snapshot(1, 2.5), 2, is_best=False))
    assert kills > 15
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_killed_at_any_moment_of_deleting_old_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(alone(), tmp_path, snapshot(step), 9, is_best=False)

    def body(number: int) -> int:
        die_at_event(number, tmp_path / "step_00000001")
        checkpoint.save(alone(), tmp_path, snapshot(4), 2, is_best=False)
        return 0

    for number in range(1, 5):
        (status,) = exit_statuses([fork(lambda number=number: body(number))])
        assert status == -signal.SIGKILL
        skipped: dict[Path, str] = {}
        newest = checkpoint.newest_valid(tmp_path, skipped.__setitem__)
        assert newest is not None
        assert (newest.name, skipped) == ("step_00000004", {})


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
        checkpoint.save(context, folder, large(context, 1, of_rank), 9, is_best=False)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
        try:
            checkpoint.save(context, folder, large(context, 2, of_rank), 9, is_best=False)
            told = ("nothing", "")
        except (EnvironmentProblem, PeerError) as error:
            told = (type(error).__name__, str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        context.gather_objects(None)
        after = sorted(path.name for path in folder.iterdir())
        assert after == ["step_00000001"], after
        context.gather_objects(None)
        checkpoint.save(context, folder, large(context, 3, of_rank), 9, is_best=False)
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


@pytest.mark.parametrize("broken", ["_open_aside", "_publish", "_delete_old", "write_atomically"])
def test_failure_of_rank_zero_alone_is_told_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "some/path")

    def function(context: RunContext) -> str:
        state = {"world_size": context.world_size}
        try:
            checkpoint.save(context, tmp_path, checkpoint.Snapshot(1, {}, {}, state), 2, is_best=True)
        except (OSError, EnvironmentProblem, PeerError) as error:
            context.gather_objects(None)  # both are here
            return f"{type(error).__name__}: {error}"
        return "nothing"

    monkeypatch.setattr(checkpoint, broken, fail)
    told = in_ranks(tmp_path, 2, function)
    assert told[0].startswith(("OSError", "EnvironmentProblem"))
    assert "No space left" in told[0]
    assert told[1].startswith("PeerError: rank 0 failed:")
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
        patch.setattr(checkpoint, "save_file", fail)
        attempt = run(tmp_path / "run", longer, 2)
    assert attempt.statuses[0] == 3
    assert attempt.outcome().kind == "environment error"
    assert "No space left on device" in (attempt.outcome().message or "")
    assert "run/checkpoints/.tmp_step_00000016/rank_0.safetensors" in (attempt.outcome().message or "")
    assert attempt.checkpoint().name == "step_00000008"
    assert finished(tmp_path / "run", longer, 2).outcome().step == 16


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoint_by_the_clock_is_taken_by_all_ranks_at_the_same_step(tmp_path: Path, world_size: int) -> None:
    minutes = {"every_minutes": 1e-9, "every_epochs": None, "keep": 100}
    attempt = finished(tmp_path, tiny_config(checkpoint=minutes, max_epochs=1), world_size)
    assert attempt.checkpoints() == ["best.json", *(f"step_{step:08d}" for step in range(1, 9))]
