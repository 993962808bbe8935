"""Injected faults: whose, when, how often; those that end the process are tried in tests/dist and tests/e2e."""

import os
import signal
from pathlib import Path

import pytest
import torch

from configs.run_dir import AttemptDir
from configs.sections import FaultConfig
from trainer.faults import Faults, Pieces, unreached

PIECES: Pieces = [(torch.ones(2, 1, 3, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))]


def faults(*given: FaultConfig, rank: int = 0, attempt: str = "001", folder: Path = Path()) -> Faults:
    return Faults(given, rank, AttemptDir(Path(attempt)).number, folder)


def is_bad(pieces: Pieces) -> bool:
    return any(bool(images.isnan().any()) for images, _ in pieces if images.is_floating_point())


def test_a_fault_is_one_ranks_at_one_step() -> None:
    nan = FaultConfig(kind="nan", rank=1, step=7)
    for rank, step in ((0, 7), (1, 6), (1, 8)):
        assert faults(nan, rank=rank).strike(step, PIECES) is PIECES
    assert is_bad(faults(nan, rank=1).strike(7, PIECES))


@pytest.mark.parametrize(
    ("attempt", "label", "strikes"),
    [(1, "001", True), (1, "002", False), (2, "002", True), (2, "002-node1", True), (None, "013", True)],
)
def test_a_fault_belongs_to_an_attempt(attempt: int | None, label: str, strikes: bool) -> None:
    nan = FaultConfig(kind="nan", step=3, attempt=attempt)
    assert is_bad(faults(nan, attempt=label).strike(3, PIECES)) == strikes


def test_evaluations_have_none() -> None:
    assert not is_bad(faults(FaultConfig(kind="nan", attempt=1), attempt="eval-001").strike(0, PIECES))


def test_each_happens_once_and_one_at_a_time() -> None:
    """So two at one step are two bad batches in a row, where the step does not move."""
    found = faults(FaultConfig(kind="nan", step=3), FaultConfig(kind="nan", step=3))
    assert [is_bad(found.strike(3, PIECES)) for _ in range(3)] == [True, True, False]


def test_errors_say_that_they_are_injected() -> None:
    with pytest.raises(RuntimeError, match="injected on rank 0 at step 2"):
        faults(FaultConfig(kind="raise", step=2)).strike(2, PIECES)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory, injected"):
        faults(FaultConfig(kind="oom", step=2)).strike(2, PIECES)


def test_a_corrupted_checkpoint_differs_in_one_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _pid, number: signals.append(number))
    for name in ("step_00000001", "step_00000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "small").write_bytes(b"a" * 10)
        (tmp_path / name / "large").write_bytes(bytes(range(100)))
    faults(FaultConfig(kind="corrupt_checkpoint"), folder=tmp_path).strike(0, PIECES)
    assert signals == [signal.SIGKILL]
    changed = (tmp_path / "step_00000002" / "large").read_bytes()
    assert [index for index in range(100) if changed[index] != index] == [50]
    assert (tmp_path / "step_00000001" / "large").read_bytes() == bytes(range(100))
    assert (tmp_path / "step_00000002" / "small").read_bytes() == b"a" * 10


def test_a_fault_that_no_step_came_by_is_told() -> None:
    given = (
        FaultConfig(kind="nan", rank=1, step=7),
        FaultConfig(kind="exit", step=3, attempt=1),
        FaultConfig(kind="slow", step=9, attempt=None),
        FaultConfig(kind="hang", step=4, attempt=2),
    )
    assert unreached(given[1:], 2, range(4, 10)) == []
    assert unreached(given, 1, range(3, 7)) == [
        "note: faults: nan of rank 1 at step 7 did not happen: this start went from step 3 to 7",
        "note: faults: slow of rank 0 at step 9 did not happen: this start went from step 3 to 7",
    ]
