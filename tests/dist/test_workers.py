"""What ends a loader worker is one sentence with the fix; once the run was asked to stop, it is nothing."""

import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.errors import EnvironmentProblem, LockstepError
from tests import splitmix
from tests.dist.harness import Attempt, finished, in_ranks, run, tiny_config
from tests.dist.test_resume import assert_same_ending
from trainer.data import workers
from trainer.data.stream import StreamSource
from trainer.runtime import RunContext

CPU = torch.device("cpu")
STREAMED: dict[str, Any] = {
    "data": {"name": "tests.dist.toys:fatal_images", "num_classes": 4, "residency": "stream", "num_workers": 2},
    "checkpoint__every_epochs": None,
    "eval__every_epochs": None,
}


def dying(tmp_path: Path, does: str, **environment: str) -> Attempt:
    """Two ranks, of which a worker of rank 1 does that in reading its first sample of the fifth step."""
    sample = splitmix.permutation(64, 0, 0)[4 * 8 + 4]
    return run(tmp_path, tiny_config(**STREAMED), 2, {"FATAL": str(sample), "FATAL_DOES": does} | environment)


# What is done in the worker, the exit code, and what is told.
ENDS = {
    "SIGKILL": (3, "environment error", "was killed by SIGKILL, usually because memory ran out: use fewer data.num_"),
    "SIGBUS": (3, "environment error", "was killed by SIGBUS, usually because /dev/shm is full: use a larger one"),
    "SIGSEGV": (1, "training error", "was killed by SIGSEGV, a crash in native code; data.num_workers=0 shows where"),
    "exit": (1, "training error", "ended with exit code 7; data.num_workers=0 shows where"),
}


@pytest.mark.parametrize("does", ENDS)
def test_a_worker_that_dies_is_one_sentence_with_the_fix(tmp_path: Path, does: str) -> None:
    code, kind, said = ENDS[does]
    attempt = dying(tmp_path, does)
    assert attempt.statuses == [1, code]
    assert (attempt.outcome(0).kind, attempt.outcome(1).kind) == ("peer", kind)
    message = attempt.outcome(1).message or ""
    assert message.startswith("a loader worker (pid ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("does", ["SIGKILL", "SIGBUS", "SIGSEGV", "exit"])
def test_a_worker_that_dies_after_a_stop_request_loses_nothing(tmp_path: Path, does: str) -> None:
    whole = finished(tmp_path / "whole", tiny_config(**STREAMED), 2)
    stopped = dying(tmp_path / "cut", does, FATAL_STOPS="1")
    (step,) = {outcome.step for outcome in stopped.outcomes if outcome and outcome.status == "stopped"}
    assert stopped.statuses == [0, 0]
    assert stopped.checkpoint().name == f"step_{step:08d}"
    assert "Traceback" not in stopped.log(0) + stopped.log(1)
    assert_same_ending(finished(tmp_path / "cut", tiny_config(**STREAMED), 2), whole)


def test_the_error_of_a_data_set_keeps_its_text_and_gets_its_sample(tmp_path: Path) -> None:
    attempt = dying(tmp_path, "raise")
    outcome = attempt.outcome(1)
    assert (outcome.kind, outcome.exit_code) == ("training error", 1)
    sample = splitmix.permutation(64, 0, 0)[4 * 8 + 4]
    assert (outcome.message or "").startswith(f"sample {sample} cannot be read: ValueError: boom-731 (tests/dist/toys")
    assert 'raise ValueError("boom-731' in attempt.log(1)  # its stack


class Squares:
    """Sixteen images of 300 x 300."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((1, 300, 300), index, dtype=torch.uint8), 0


class Leaking(Squares):
    """Opens files and never closes one."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.files = [open(os.devnull) for _ in range(200)]  # noqa: SIM115
        return super().__getitem__(index)


def told(tmp_path: Path, split: Squares, *, spare: int = 100, largest: int = 10**9, held: int = 0) -> str:
    """What a rank says that may have `spare` more descriptors and files of up to `largest` bytes, and holds that many
    descriptors when the workers are there."""

    def function(_context: RunContext) -> str:
        source = StreamSource(split, 0, 10, 2, CPU)
        used = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, used + spare))
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        try:
            batches = source.evaluation([range(index, index + 2) for index in range(0, 16, 2)])
            next(batches)
            with contextlib.ExitStack() as stack:
                for _ in range(held):
                    with contextlib.suppress(OSError):
                        stack.enter_context(open(os.devnull))
                return f"read {1 + len(list(batches))}"
        except LockstepError as error:
            return f"{error.exit_code}: {error}"

    (text,) = in_ranks(tmp_path, 1, function)
    return text


def test_limits_that_are_large_enough_are_no_problem(tmp_path: Path) -> None:
    assert told(tmp_path, Squares()) == "read 8"


def test_a_batch_that_shared_memory_cannot_take_is_told_and_nothing_hangs(tmp_path: Path) -> None:
    text = told(tmp_path, Squares(), largest=100_000)
    assert text.startswith("3: /dev/shm cannot take a batch of 180,000 bytes (")
    assert text.endswith("use a larger one (docker: --shm-size), fewer data.num_workers, or data.num_workers=0")


@pytest.mark.parametrize(
    "limits",
    [
        lambda path: told(path, Squares(), spare=2),  # too few to start a worker
        lambda path: told(path, Squares(), spare=16),  # a worker has too few for its batch
        lambda path: told(path, Leaking()),  # a worker's data set
        lambda path: told(path, Squares(), held=200),  # the rank, when it takes a batch over
    ],
)
def test_too_many_open_files_are_told_with_the_limit(tmp_path: Path, limits: Callable[[Path], str]) -> None:
    text = limits(tmp_path)
    assert text.startswith("3: ")
    assert "oo many open files" in text
    assert "data.num_workers=0" in text


@pytest.mark.parametrize(("free", "is_told"), [(2_000, False), (1_999, True), (1_280, True), (None, False)])
def test_what_is_read_ahead_is_compared_with_shared_memory(
    monkeypatch: pytest.MonkeyPatch, free: int | None, is_told: bool
) -> None:
    # Training: 2 ranks x 4 workers x 2 batches of 80 bytes = 1,280. An evaluation: 360 bytes more a rank.
    monkeypatch.setattr(workers, "_free_shm", lambda: free)
    assert len(workers.check_shared_memory(2, 4, 80, 360)) == is_told


def test_too_little_shared_memory_for_training_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_free_shm", lambda: 1_279)
    with pytest.raises(EnvironmentProblem, match=r"/dev/shm has 1,279 bytes free and 2 x 4 .* may need 1,280"):
        workers.check_shared_memory(2, 4, 80, 360)


def test_a_run_whose_batches_do_not_fit_is_refused_before_its_first_step(tmp_path: Path) -> None:
    def small(_path: object) -> object:
        return os.statvfs_result((1, 1, 0, 0, 100, 0, 0, 0, 0, 255))

    config = tiny_config(**STREAMED)
    real = os.statvfs
    os.statvfs = small  # type: ignore[assignment]
    try:
        attempt = run(tmp_path, config, 2)
    finally:
        os.statvfs = real
    assert attempt.statuses == [3, 3]
    # 2 workers a rank x 2 batches x 4 images of 64 bytes.
    assert "has 100 bytes free and 2 x 2 loader workers may need 2,048" in (attempt.outcome().message or "")
    assert attempt.outcome().step is None
