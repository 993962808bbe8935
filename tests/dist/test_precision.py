"""What computes in float16 or bfloat16, and what happens to an update that overflows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.harness import finished, run, tiny_config

WARNING = "fp16 on a CPU is for testing"
COSINE = [0.976, 0.905, 0.794, 0.655, 0.500, 0.345, 0.206, 0.095, 0.024, 0.000]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", "torch.float32"), ("fp16", "torch.float16"), ("bf16", "torch.bfloat16")]
)
def test_layers_compute_in_the_precision_that_is_told(
    tmp_path: Path, world_size: int, precision: str, dtype: str
) -> None:
    config = tiny_config(mixed_precision=precision, model={"name": "tests.dist.toys:NotesDtype"}, max_epochs=1)
    attempt = finished(tmp_path / "run", config, world_size, {"DTYPES": str(tmp_path / "dtypes")})
    # Training and evaluation alike.
    assert set((tmp_path / "dtypes").read_text().split()) == {dtype}
    assert attempt.result()["precision"] == precision
    assert f"precision  {precision}\n" in attempt.log()
    assert attempt.log().count(WARNING) == (precision == "fp16")
    assert {tensor.dtype for tensor in attempt.export().values()} == {torch.float32}
    if precision == "fp16":
        assert attempt.metric("fp16/scale") == [(step, 65536.0) for step in range(1, 9)]
        assert attempt.events("fp16/skipped") == [(step, 0.0) for step in range(1, 9)]
    else:
        assert attempt.metric("fp16/scale") == []


def overflowing(first: int, count: int, **changes: Any) -> Any:
    model = {"name": "tests.dist.toys:Overflows", "args": {"rank": 1, "first": first, "count": count}}
    return tiny_config(mixed_precision="fp16", model=model, **changes)


def test_skipped_updates_are_no_steps(tmp_path: Path) -> None:
    schedule = {"name": "cosine"}
    config = overflowing(2, 2, max_epochs=None, max_steps=10, schedule=schedule, optim={"name": "sgd", "lr": 1.0})
    attempt = finished(tmp_path, config, 2)
    state = attempt.checkpoint().state["train_state"]
    assert (state["step"], state["skipped"], state["batch"], state["samples_seen"]) == (10, 2, 12, 96)
    # Steps 1 and 2, then two batches that change nothing but the scale, then steps 3 to 10.
    assert attempt.metric("fp16/skipped") == [(step, 0.0 if step < 3 else 2.0) for step in range(1, 11)]
    assert attempt.metric("fp16/scale") == [(step, 65536.0 if step < 3 else 16384.0) for step in range(1, 11)]
    assert [value for _, value in attempt.metric("optim/lr")] == pytest.approx(COSINE, abs=5e-4)
    assert attempt.result()["skipped"] == 2


def test_epochs_end_with_the_data_whatever_was_skipped(tmp_path: Path) -> None:
    attempt = finished(tmp_path, overflowing(0, 3, max_epochs=2), 2)
    state = attempt.checkpoint().state["train_state"]
    assert (state["step"], state["skipped"], state["batch"], state["epoch"]) == (13, 3, 16, 2)
    assert "the schedule ended 3 steps short" in attempt.log()


def test_resume_among_skipped_updates_goes_on_with_the_scale(tmp_path: Path) -> None:
    # Killed in pass 6, when steps 1 to 4 were made and passes 1 and 2 were skipped; the checkpoint is that of step 3.
    config = overflowing(1, 2, checkpoint__every_steps=3)
    killed = run(tmp_path, config, 2, {"DIE_AT": "6", "DIE_RANK": "0"})
    assert killed.statuses[0] == -9
    saved = killed.checkpoint().state
    assert (saved["train_state"]["step"], saved["train_state"]["batch"]) == (3, 5)
    assert saved["scaler"]["scale"] == 16384.0
    # In the new process the passes are counted anew, so two more are skipped.
    state = finished(tmp_path, config, 2).checkpoint().state
    assert (state["train_state"]["step"], state["train_state"]["batch"], state["train_state"]["skipped"]) == (12, 16, 4)
    assert state["scaler"]["scale"] == 4096.0


def test_25_overflows_in_a_row_stop_all_ranks(tmp_path: Path) -> None:
    attempt = run(tmp_path, overflowing(4, 1000, max_epochs=10, checkpoint__every_steps=4), 2)
    assert attempt.statuses == [1, 1]
    for rank in range(2):
        outcome = attempt.outcome(rank)
        assert outcome.kind == "training error"
        # 65536 halved 25 times.
        assert "25 updates in a row overflowed in fp16 at step 4 (batch 29, lr 0.1, scale 0.00195312)" in (
            outcome.message or ""
        )
    assert attempt.checkpoint().name == "step_00000004"


def test_24_overflows_in_a_row_do_not(tmp_path: Path) -> None:
    attempt = finished(tmp_path, overflowing(4, 24, max_epochs=4), 2)
    assert attempt.result()["skipped"] == 24
    assert attempt.result()["step"] == 8
