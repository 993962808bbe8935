"""A save that fails on one rank fails on all, in one sentence, and the last checkpoint stands."""

import errno
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from configs.errors import EnvironmentProblem
from tests.dist.harness import finished, in_ranks, run, tiny_config
from tests.checkpoints import save, snapshot
from trainer import checkpoint, disk, saving
from trainer.runtime import PeerError, RunContext


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
    [(0, "_make"), (0, "write_tensors"), (0, "write_text"), (0, "publish"), (0, "tidy"), (0, "mark_best")]
    + [(1, "_make"), (1, "write_tensors"), (1, "write_atomically")],
)
def test_failure_of_one_rank_alone_is_told_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, broken: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "some/path")

    def function(context: RunContext) -> str:
        if context.rank == rank:  # in this process only
            monkeypatch.setattr(saving, broken, fail)
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
def test_checkpoint_by_the_clock_is_taken_by_all_ranks_at_the_same_step(tmp_path: Path, world_size: int) -> None:
    minutes = {"every_minutes": 1e-9, "every_epochs": None, "keep": 100}
    attempt = finished(tmp_path, tiny_config(checkpoint=minutes, max_epochs=1), world_size)
    assert attempt.checkpoints() == ["best.json", *(f"step_{step:08d}" for step in range(1, 9))]
