"""Disks that are full, too small, limited or read-only: one sentence, exit 3, and the last checkpoint stands."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dist.harness import Attempt, exit_statuses, finished, fork, run, tiny_config
from tests.dist.mounts import mount_private, needs_mounts
from trainer import checkpoint, disk
from trainer.checkpoint import fault_of, step_folders

SHORT, LONG = tiny_config(max_epochs=1), tiny_config(max_epochs=2)
SIZE = 64 * 16 * 4 + 16 * 4 + 16 * 4 * 4 + 4 * 4
"""Bytes of the weights of tiny_config's network, 64-16-4; momentum has as many."""


def in_a_fork(body: Callable[[], None]) -> None:
    """Run `body` in a process that may change its limits and mounts; a failed assertion there fails the test."""

    def succeeds() -> int:
        body()
        return 0

    assert exit_statuses([fork(succeeds)]) == [0], "see the traceback above"


def assert_stands(attempt: Attempt, told: str, kind: str = "environment error") -> None:
    """Exit 3 with one sentence by the rank that knows; the checkpoint of the first epoch is whole and the newest."""
    known = [outcome for outcome in attempt.outcomes if outcome and outcome.kind != "peer"]
    assert {outcome.kind for outcome in known} == {kind}, attempt.log()
    assert {outcome.exit_code for outcome in known} == {3}
    assert any(told in (outcome.message or "") for outcome in known), [outcome.message for outcome in known]
    assert all("\n" not in (outcome.message or "") for outcome in known)
    assert attempt.checkpoint().name == "step_00000008"
    assert "saved step_00000016" not in attempt.log()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_disk_that_fills_up_while_training(tmp_path: Path, world_size: int) -> None:
    needs_mounts()
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)

    def body() -> None:
        mount_private(place, num_bytes=1 << 20)
        finished(tmp_path / "run", SHORT, world_size)
        with (place / "somebody else's").open("wb") as file:
            file.truncate(0)
            left = disk.free_bytes(place) - 4 * 4096  # blocks: neither the weights nor the rest of a checkpoint fit
            file.write(b"x" * left)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk, "check_space", lambda *_: None)  # as if the space went after the start
            failed = run(tmp_path / "run", LONG, world_size)
        assert_stands(failed, "No space left on device")
        message = next(o.message for o in failed.outcomes if o and o.kind == "environment error")
        assert f"cannot write {place}/.tmp_step_00000016" in (message or "")
        assert "the last checkpoint stands; free some space" in (message or "")
        assert not list(place.glob(".tmp_*"))
        assert [path.name for path in step_folders(place) if fault_of(path) is None] == ["step_00000008"]
        (place / "somebody else's").unlink()
        assert finished(tmp_path / "run", LONG, world_size).outcome().step == 16

    in_a_fork(body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_folder_that_becomes_read_only(tmp_path: Path, world_size: int) -> None:
    needs_mounts()
    place = tmp_path / "run" / "checkpoints"
    finished(tmp_path / "run", SHORT, world_size)

    def body() -> None:
        mount_private(place, read_only=True)
        failed = run(tmp_path / "run", LONG, world_size)
        assert_stands(failed, f"cannot make {place}/.tmp_step_00000016: Read-only file system")
        assert "make the folder writable" in (failed.outcome().message or "")

    in_a_fork(body)
    assert finished(tmp_path / "run", LONG, world_size).outcome().step == 16


def test_a_space_that_is_too_small_is_told_with_numbers_before_the_first_step(tmp_path: Path) -> None:
    needs_mounts()
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    each = 2 * SIZE + 8  # and the window's sum

    def body() -> None:
        mount_private(place, num_bytes=4 * 4096)
        free = disk.free_bytes(place)
        failed = run(tmp_path / "run", SHORT)
        outcome = failed.outcome()
        assert (outcome.kind, outcome.exit_code, outcome.step) == ("environment error", 3, 0)
        needs = f"needs {4 * each:,}: 4 more checkpoints of {each:,} bytes, up to 4 at once"
        assert f"{place} has {free:,} bytes free and {needs}" in (outcome.message or "")
        assert "lower checkpoint.keep" in (outcome.message or "")
        assert list(place.iterdir()) == []
        assert not failed.run_dir.metrics.exists()

    in_a_fork(body)


def test_what_lies_there_already_is_not_asked_for_again(tmp_path: Path) -> None:
    config = tiny_config(max_epochs=2, checkpoint__every_steps=4)
    finished(tmp_path, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "free_bytes", lambda _: 0)
        failed = run(tmp_path, tiny_config(max_epochs=3))
    each = 2 * SIZE + 8
    there = len(step_folders(tmp_path / "checkpoints"))
    assert there >= 2
    assert f"needs {(4 - there) * each:,}: {4 - there} more" in (failed.outcome().message or "")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_limit_on_files_is_told_before_the_first_step(tmp_path: Path, world_size: int) -> None:
    def body() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE - 1, hard))
        failed = run(tmp_path / "run", SHORT, world_size)
        outcome = failed.outcome()
        assert (outcome.kind, outcome.exit_code, outcome.step) == ("environment error", 3, 0)
        assert f"`ulimit -f` lets this process write files of {SIZE - 1:,} bytes" in (outcome.message or "")
        assert f"has {SIZE:,}; raise `ulimit -f`" in (outcome.message or "")

    in_a_fork(body)


def test_a_quota_in_the_middle(tmp_path: Path) -> None:
    """Both ranks' own parts fit; rank 0's weights do not."""
    short, long = (tiny_config(max_epochs=epochs, model__args={"hidden": [128]}) for epochs in (1, 2))
    finished(tmp_path / "run", short, 2)

    def body() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 128 * 4, hard))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk, "check_space", lambda *_: None)
            failed = run(tmp_path / "run", long, 2)
        assert_stands(failed, "File too large")
        assert not list((tmp_path / "run" / "checkpoints").glob(".tmp_*"))

    in_a_fork(body)


def test_a_failed_save_reaches_all_ranks_within_a_step(tmp_path: Path) -> None:
    """Of many steps to go: the rank that failed asks for a save, which tells the others."""
    config = tiny_config(max_epochs=50, checkpoint={"every_steps": 3, "every_epochs": None}, log__every_steps=1000,
                         eval__every_epochs=None, model={"name": "tests.dist.test_disks:Waits"})  # fmt: skip

    def fail(path: Path, _tensors: dict[str, torch.Tensor]) -> None:
        raise OSError(28, "No space left on device", str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.saving.write_tensors", fail)
        failed = run(tmp_path, config, 2)
    assert failed.statuses == [3, 3]
    assert failed.outcome().step == 4, "the first step after the save that failed"
    assert checkpoint.step_folders(tmp_path / "checkpoints") == []


class Waits(nn.Module):
    """In training forward passes its rank waits for what it is writing, so that a failure is known."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        from tests.dist.toys import finish_writing

        if self.training:
            finish_writing()
        logits: torch.Tensor = self.head(images.flatten(1))
        return logits
