"""The account of time on a clock that the test moves, and what is told of several attempts and several ranks."""

import os
from pathlib import Path

import pytest

from configs.beat import COMPUTE, DATA, EVALUATION, LAYOUT, SAVING, STARTING, UPDATE, WAITING, Beat, read_beat
from configs.run_dir import AttemptDir, RunDir
from trainer import account
from trainer.account import (
    Account,
    Earlier,
    earlier_attempts,
    replayed_steps,
    straggler_lines,
    that_counts,
    time_of_run,
)


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 1_000_000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(account, "time", clock)
    return clock


def spend(clock: Clock, own: Account, phase: int, seconds: float) -> None:
    own.enter(phase)
    clock.now += seconds


def test_every_second_is_in_one_kind(clock: Clock) -> None:
    own = Account()
    clock.now += 4
    own.start_at(0)
    for step in range(3):
        own.begin_step()
        clock.now += 1
        for phase, seconds in ((COMPUTE, 2.0), (COMPUTE, 3.0), (WAITING, 4.0), (UPDATE, 5.0)):
            spend(clock, own, phase, seconds)
        own.end_step(step + 1)
        clock.now += 0.5
    spend(clock, own, EVALUATION, 6)
    spend(clock, own, SAVING, 7)
    expected = {"startup": 4, "data": 3, "compute": 30, "waiting": 12, "evaluation": 6, "checkpoints": 7, "other": 1.5}
    assert own.by_kind() == expected
    assert sum(expected.values()) == clock.now - 50
    assert own.busy_s() == 45


def test_start_up_begins_with_the_launchers_plan(clock: Clock, tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path)
    attempt.plan.write_text("{}")
    os.utime(attempt.plan, (1_000_040, 1_000_040))
    own = Account(attempt, 3)
    assert own.by_kind()["startup"] == 10
    assert read_beat(attempt.beat(3)) == Beat(STARTING, 0, 1_000_050, 0.0, -1, 1_000_040)
    clock.now += 2
    own.start_at(6)
    own.begin_step()
    assert read_beat(attempt.beat(3)) == Beat(DATA, 6, 1_000_052, 0.0, 6, 1_000_040)


def test_the_median_is_of_the_last_steps(clock: Clock) -> None:
    own = Account()
    seen = {}
    for step in range(1, 97):
        own.begin_step()
        clock.now += 60 if step == 1 else step  # the first one compiles
        own.end_step(step)
        seen[step] = own.median_s
    assert (seen[1], seen[3]) == (60, 60)  # of two the upper one
    assert seen[4] == 4
    assert seen[8] == 6
    assert seen[64] == 49  # of the steps from 33 to 64
    assert seen[95] == 49
    assert seen[96] == 81


def zero(**seconds: float) -> dict[str, float]:
    kinds = ("startup", "data", "compute", "waiting", "evaluation", "checkpoints", "other")
    return dict.fromkeys(kinds, 0.0) | seconds


def test_restarts_are_what_the_attempts_took_and_nothing_counts_for() -> None:
    before = zero(startup=4.0, compute=10.0)  # up to the checkpoint; the attempt went on for 6 s and was killed
    own = zero(startup=3.0, compute=20.0, evaluation=1.0)
    assert that_counts(before, own) == zero(startup=4.0, compute=30.0, evaluation=1.0)
    spent = time_of_run(before, own, Earlier(wall_s=20.0, replayed_steps=5))
    assert spent.seconds == zero(startup=4.0, compute=30.0, evaluation=1.0) | {"restarts": 9.0}
    assert spent.total_s == 20 + 24
    assert spent.goodput == 30 / 44
    assert spent.describe() == (
        "start-up 4.0 s  data 0.0 s  compute 30.0 s  waiting for others 0.0 s  evaluation 1.0 s  checkpoints 0.0 s  "
        "other 0.0 s  restarts 9.0 s  replayed steps 5  goodput 68 %"
    )
    assert spent.metrics()["perf/time_restarts_s"] == 9.0
    assert spent.metrics()["perf/goodput"] == 30 / 44
    assert spent.facts()["total_s"] == 44


def test_without_a_checkpoint_all_of_an_earlier_attempt_was_in_vain() -> None:
    spent = time_of_run({}, zero(startup=3.0, compute=5.0), Earlier(wall_s=12.0, replayed_steps=0))
    assert spent.seconds == zero(startup=3.0, compute=5.0) | {"restarts": 12.0}


def test_a_run_whose_attempts_were_deleted_has_no_negative_time() -> None:
    spent = time_of_run(zero(startup=4.0, compute=10.0), zero(startup=3.0, compute=5.0), Earlier(0.0, 0))
    assert spent.seconds["restarts"] == 0
    assert spent.total_s == 19


@pytest.mark.parametrize(
    ("attempts", "first_step", "replayed"),
    [
        ([], 0, 0),
        ([(0, 7)], 6, 1),
        ([(0, 7)], 0, 7),
        ([(0, 8)], 8, 0),  # stopped, with a checkpoint
        ([(0, 7), (6, 11)], 9, 1 + 2),
        ([(0, 7), (-1, 0), (6, 11)], 9, 1 + 2),  # one ended in start-up
    ],
)
def test_replayed_steps(attempts: list[tuple[int, int]], first_step: int, replayed: int) -> None:
    beats = [Beat(COMPUTE, step, 1.0, 0.1, first, 1.0) for first, step in attempts]
    assert replayed_steps(beats, first_step) == replayed


def test_earlier_attempts_are_read_from_the_run_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for label, fields in {
        "002": (COMPUTE, 11, 230.0, 0.1, 6, 200.0),
        "001-node1": (COMPUTE, 7, 120.0, 0.1, 0, 100.0),  # torchrun gave rank 0 to node 1
        "003": (COMPUTE, 99, 999.0, 0.1, 9, 300.0),  # the current one
        "eval-001": (EVALUATION, 0, 500.0, 0.0, -1, 1.0),
    }.items():
        run.attempt(label).path.mkdir(parents=True)
        run.attempt(label).beat(0).write_bytes(LAYOUT.pack(*fields))
    run.attempt("004").path.mkdir()  # ended before any rank had begun
    run.attempt("002").ended.write_text("290.5")  # hung for a minute
    assert earlier_attempts(run, run.attempt("003"), 9) == Earlier(20.0 + 90.5, 1 + 2)


def ranks(*seconds: tuple[float, float, float]) -> list[dict[str, float]]:
    return [zero(data=data, compute=compute, waiting=waiting) for data, compute, waiting in seconds]


def test_stragglers_are_named_the_slowest_first() -> None:
    assert straggler_lines(ranks((1, 39, 60), (0, 98, 2), (30, 40, 30))) == [
        "rank 1: data 0 %  compute 98 %  waiting for others 2 %  (slowest)",
        "rank 2: data 30 %  compute 40 %  waiting for others 30 %",
        "rank 0: data 1 %  compute 39 %  waiting for others 60 %",
    ]
    many = straggler_lines(ranks(*((0, 50 + rank, 50 - rank) for rank in range(40))))
    assert [line.split(":")[0] for line in many] == [f"rank {rank}" for rank in range(39, 31, -1)]


def test_on_a_gpu_only_the_data_tell_who_lagged() -> None:
    assert straggler_lines(ranks((1, 99, 0), (30, 70, 0)), on_gpu=True) == [
        "rank 1: data 30 %  compute and waiting for others 70 %  (slowest)",
        "rank 0: data 1 %  compute and waiting for others 99 %",
    ]
    (line,) = straggler_lines(ranks((1, 50, 0), (1, 90, 0)), on_gpu=True)
    assert line.endswith("of its steps on data; waiting for others is within compute on a GPU")


def test_no_rank_lagged_where_the_difference_is_small_or_of_no_matter() -> None:
    line = "no rank lagged: each spent 90 to 95 % of its steps on its own work"
    assert straggler_lines(ranks((10, 85, 5), (10, 80, 10))) == [line]
    assert straggler_lines(ranks((0.0, 0.5, 0.5), (0.0, 0.9, 0.1)))[0].startswith("no rank lagged")
    assert straggler_lines(ranks((0, 0, 0), (0, 0, 0)))[0].startswith("no rank lagged: each spent 0 %")
