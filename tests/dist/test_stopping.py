"""A signal to any rank stops all after the same step, with one checkpoint to go on from."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.harness import Attempt, finished, run, tiny_config
from tests.dist.test_resume import assert_same_ending

# Eight steps in an epoch. No checkpoint is due but at the end.
CHANGES: dict[str, Any] = {
    "model": {"name": "tests.dist.toys:WithDropout"},
    "checkpoint__every_epochs": None,
    "log__every_steps": 2,
    "eval__every_steps": 6,
    "ema__half_life_samples": 40.0,
}


def stopped_at(attempt: Attempt, step: int) -> None:
    """All ranks stopped after `step` and left one checkpoint, of that step."""
    for rank, status in enumerate(attempt.statuses):
        outcome = attempt.outcome(rank)
        assert status == 0
        assert (outcome.status, outcome.step, outcome.checkpoint) == ("stopped", step, f"step_{step:08d}")
        assert "Traceback" not in attempt.log(rank)
    assert [name for name in attempt.checkpoints() if name != "best.json"] == [f"step_{step:08d}"]


# After 3: nothing is due. 4: a log point. 6: log and evaluation. 8: the end of the epoch too. 15: the last but one.
@pytest.mark.parametrize("step", [1, 4, 6, 8, 15])
def test_resume_after_a_stop_is_bit_identical(tmp_path: Path, step: int) -> None:
    config = tiny_config(**CHANGES)
    # An evaluation saves if it is the best so far: not here.
    whole = finished(tmp_path / "whole", config, 2)
    stopped = run(tmp_path / "cut", config, 2, {"STOP_AT": str(step - 1), "STOP_RANK": "1"})
    assert [outcome and outcome.signal for outcome in stopped.outcomes] == [None, "SIGTERM"]
    assert {(outcome.status, outcome.step) for outcome in stopped.outcomes if outcome} == {("stopped", step)}
    assert stopped.checkpoint().name == f"step_{step:08d}"
    resumed = finished(tmp_path / "cut", config, 2)
    assert_same_ending(resumed, whole)
    assert [s for s, _ in resumed.metric("train/loss")] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert [s for s, _ in resumed.metric("eval/top1")] == [6, 8, 12, 16]


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 0), (3, 2)])
def test_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path, world_size: int, rank: int) -> None:
    config = tiny_config(**CHANGES | {"eval__every_steps": None})
    environment = {"STOP_AT": "4", "STOP_RANK": str(rank)}
    stopped_at(run(tmp_path, config, world_size, environment), 5)


def test_signal_in_the_last_step_leaves_the_last_evaluation_for_later(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", tiny_config(**CHANGES), 2)
    stopped = run(tmp_path / "cut", tiny_config(**CHANGES), 2, {"STOP_AT": "15", "STOP_RANK": "1"})
    assert {(outcome.status, outcome.step) for outcome in stopped.outcomes if outcome} == {("stopped", 16)}
    assert_same_ending(finished(tmp_path / "cut", tiny_config(**CHANGES), 2), whole)


@pytest.mark.parametrize("world_size", [1, 2])
def test_request_that_was_there_before_the_start(tmp_path: Path, world_size: int) -> None:
    attempt = run(tmp_path, tiny_config(**CHANGES), world_size, stop_request="SIGINT")
    stopped_at(attempt, 1)
    assert [outcome and outcome.signal for outcome in attempt.outcomes] == ["SIGINT"] * world_size


def test_what_a_stop_put_off_is_logged_once_even_if_it_is_done_twice(tmp_path: Path) -> None:
    # Stopped at 4, where a log point is due; then killed at 5, before a checkpoint: step 4 is due again.
    config = tiny_config(**CHANGES)
    whole = finished(tmp_path / "whole", config)
    run(tmp_path / "cut", config, 1, {"STOP_AT": "3"})
    assert run(tmp_path / "cut", config, 1, {"DIE_AT": "1"}).statuses == [-9]
    resumed = finished(tmp_path / "cut", config)
    assert resumed.lines() == whole.lines()
    assert all(torch.equal(tensor, resumed.export()[name]) for name, tensor in whole.export().items())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_stop_in_an_evaluation_saves_the_epoch_and_does_it_all_later(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(model={"name": "tests.dist.toys:StopsInEvaluation"}, log__every_steps=2)
    whole = finished(tmp_path / "whole", config, world_size)
    for step in (8, 16):  # in the evaluation of the first epoch, then in the last one
        stopped = run(tmp_path / "cut", config, world_size, {"STOP_EVAL": str(world_size - 1)})
        ended = {(outcome.status, outcome.step) for outcome in stopped.outcomes if outcome}
        assert ended == {("stopped", step)}
        if step == 8:
            environment = {"DIE_AT": "0", "DIE_RANK": str(world_size - 1)}
            assert run(tmp_path / "cut", config, world_size, environment).statuses[-1] == -9
    assert_same_ending(finished(tmp_path / "cut", config, world_size), whole)


def test_a_save_longer_than_the_grace_time_is_told_once(tmp_path: Path) -> None:
    attempt = finished(tmp_path, tiny_config(launch__grace_s=1e-9, checkpoint__every_steps=4), 2)
    assert attempt.log().count("launch.grace_s is 1e-09 s: raise it") == 1
    assert "grace_s" not in attempt.log(1)
