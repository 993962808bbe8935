"""One rank fails, all end, and the one that failed says why."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.contract import Outcome
from configs.errors import ConfigError
from tests.dist.harness import exit_statuses, in_ranks, run, start, tiny_config
from trainer.facts import check_same
from trainer.runtime import RunContext


def failing(name: str, rank: int = 1, step: int = 3) -> dict[str, Any]:
    return {"model": {"name": f"tests.dist.toys:{name}", "args": {"rank": rank, "step": step}}}


@pytest.mark.parametrize("world_size", [2, 3])
def test_exception_is_told_by_its_rank_and_the_others_are_its_peers(tmp_path: Path, world_size: int) -> None:
    attempt = run(tmp_path, tiny_config(**failing("Raises")), world_size)
    assert attempt.statuses == [1] * world_size
    guilty = attempt.outcome(1)
    assert (guilty.status, guilty.kind, guilty.message) == ("failed", "ValueError", "boom-731")
    assert (guilty.step, guilty.epoch) == (3, 0)
    assert (guilty.where or "").startswith("tests/dist/toys.py:")
    assert "ValueError: boom-731" in attempt.log(1)
    for rank in set(range(world_size)) - {1}:
        assert attempt.outcome(rank).kind == "peer"


def test_exception_of_the_only_process(tmp_path: Path) -> None:
    attempt = run(tmp_path, tiny_config(**failing("Raises", rank=0)))
    assert attempt.statuses == [1]
    assert (attempt.outcome().kind, attempt.outcome().step) == ("ValueError", 3)


@pytest.mark.parametrize(("name", "status"), [("Killed", -signal.SIGKILL), ("Exits", 7)])
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_vanishes_takes_the_others_with_it(tmp_path: Path, name: str, status: int, rank: int) -> None:
    attempt = run(tmp_path, tiny_config(**failing(name, rank)), 2)
    assert attempt.statuses[rank] == status
    assert attempt.outcomes[rank] is None
    other = attempt.outcome(1 - rank)
    assert (other.status, other.kind, other.step) == ("failed", "peer", 3)


@pytest.mark.parametrize("shards", [0, 2])
def test_rank_that_never_comes_is_noticed_in_the_time_that_is_set(tmp_path: Path, shards: int) -> None:
    config = tiny_config(**failing("Stops"), launch__collective_timeout_s=4.0, virtual_shards=shards)
    attempt, pids = start(tmp_path, config, 2)
    statuses = exit_statuses(pids[:1])
    os.kill(pids[1], signal.SIGKILL)
    assert statuses + exit_statuses(pids[1:]) == [1, -signal.SIGKILL]
    outcome = Outcome.load(attempt.outcome(0))
    assert outcome is not None
    assert (outcome.kind, outcome.step) == ("peer", 3)


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 1), (3, 0)])
def test_loss_that_is_not_finite_stops_all_ranks_and_is_told_with_its_place(
    tmp_path: Path, world_size: int, rank: int
) -> None:
    config = tiny_config(**failing("NotFinite", rank, 5), checkpoint__every_steps=2)
    attempt = run(tmp_path, config, world_size)
    assert attempt.statuses == [1] * world_size
    for r in range(world_size):
        outcome = attempt.outcome(r)
        assert outcome.kind == "training error"
        assert f"not finite at step 5 on rank {rank} (lr 0.1)" in (outcome.message or "")
    assert attempt.checkpoint().name == "step_00000004"
    assert all(torch.isfinite(tensor).all() for tensor in attempt.weights().values())


def test_gradient_that_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    # The loss is finite and the gradient of the fourth step is not: the weights are gone, the checkpoint before stands.
    model = {"name": "tests.dist.toys:Overflows", "args": {"rank": 1, "first": 3, "count": 1}}
    attempt = run(tmp_path, tiny_config(model=model, checkpoint__every_steps=2), 2)
    assert attempt.statuses == [1, 1]
    assert attempt.outcome().kind == "training error"
    assert "not finite" in (attempt.outcome().message or "")
    assert attempt.checkpoint().name == "step_00000002"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"global_batch_size": 1}, "global_batch_size=1 is smaller than the number of processes, 2"),
        ({"drop_last": True, "global_batch_size": 65}, "drop_last: true leaves nothing of 64 samples"),
        ({"model__args": {"hiden": [3]}}, "model.args do not fit mlp"),
        ({"data__num_classes": 7}, "data.num_classes is 7 but tests.dist.toys:images has 4 classes"),
        ({"sync_batchnorm": True}, "sync_batchnorm: true works on GPUs only"),
    ],
)
def test_what_cannot_be_done_is_a_config_error_on_every_rank(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    attempt = run(tmp_path, tiny_config(**changes), 2)
    assert attempt.statuses == [2, 2]
    for rank in range(2):
        assert attempt.outcome(rank).kind == "config error"
        assert told in (attempt.outcome(rank).message or "")


def test_missed_expectation_fails_the_run_which_is_saved_all_the_same(tmp_path: Path) -> None:
    attempt = run(tmp_path, tiny_config(expect__max_train_loss=1e-9), 2)
    assert attempt.statuses == [1, 1]
    assert attempt.outcome().kind == "training error"
    assert attempt.result()["step"] == 16


def test_ranks_with_different_settings_are_refused_on_all(tmp_path: Path) -> None:
    def function(context: RunContext) -> str:
        try:
            check_same(context, {"seed": context.rank, "lr": 0.1}, "different settings")
        except ConfigError as error:
            return str(error)
        return "nothing"

    told = in_ranks(tmp_path, 2, function)
    assert told == [told[0]] * 2
    assert "seed: 0 on rank 0, 1 on rank 1" in told[0]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the checkpoint's files through /proc")
def test_a_save_of_rank_zero_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    config = tiny_config(model={"name": "tests.dist.toys:SavesSlowly"}, launch__collective_timeout_s=4.0)
    attempt = run(tmp_path, config, 2, {"SLOW_SAVE": "6"})
    assert attempt.statuses == [0, 0], attempt.log() + attempt.log(1)
    assert attempt.result()["step"] == 16


def test_code_that_raises_on_rank_zero_only_ends_all_with_its_error(tmp_path: Path) -> None:
    attempt = run(tmp_path, tiny_config(**failing("Raises", rank=0)), 3)
    assert attempt.statuses == [1, 1, 1]
    assert (attempt.outcome(0).kind, attempt.outcome(0).message) == ("ValueError", "boom-731")
    assert [attempt.outcome(rank).kind for rank in (1, 2)] == ["peer", "peer"]


def test_unused_parameters_are_named_where_ddp_needs_them(tmp_path: Path) -> None:
    attempt = run(tmp_path, tiny_config(model={"name": "tests.dist.toys:WithUnused"}), 2)
    assert attempt.statuses == [2, 2]
    assert "idle.weight, idle.bias took no part" in (attempt.outcome().message or "")


def test_a_checkpoint_folder_that_is_a_link_to_nowhere_loses_no_history(tmp_path: Path) -> None:
    tmp_path.joinpath("metrics.jsonl").write_text('{"step": 8}\n')
    (tmp_path / "checkpoints").symlink_to(tmp_path / "not mounted")
    attempt = run(tmp_path, tiny_config())
    assert attempt.statuses == [3]
    assert "is no folder" in (attempt.outcome().message or "")
    assert tmp_path.joinpath("metrics.jsonl").read_text() == '{"step": 8}\n'
