"""What ranks show while they work, and the account of time that a run ends with."""

import signal
from pathlib import Path
from typing import Any

import pytest

from configs.beat import COMPUTE, EVALUATION, FINISHING, STARTING, read_beat
from tests.dist.harness import Attempt, finished, run, tiny_config

KINDS = ("startup", "data", "compute", "waiting", "evaluation", "checkpoints", "other", "restarts")
MORTAL = {"name": "tests.dist.toys:Mortal"}


def time_of(attempt: Attempt) -> dict[str, Any]:
    found: dict[str, Any] = attempt.result()["time"]
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_account_is_the_whole_time(tmp_path: Path, world_size: int) -> None:
    attempt = finished(tmp_path, tiny_config(), world_size)
    time = time_of(attempt)
    assert set(time) == {*(f"{kind}_s" for kind in KINDS), "total_s", "replayed_steps", "goodput"}
    assert all(value >= 0 for value in time.values())
    assert sum(time[f"{kind}_s"] for kind in KINDS) == pytest.approx(time["total_s"])
    assert time["goodput"] == pytest.approx(time["compute_s"] / time["total_s"])
    assert min(time[f"{kind}_s"] for kind in ("startup", "data", "compute", "evaluation", "checkpoints")) > 0
    assert (time["waiting_s"] > 0) == (world_size > 1)
    assert (time["restarts_s"], time["replayed_steps"]) == (0, 0)
    for kind in KINDS:
        assert attempt.events(f"perf/time_{kind}_s") == [(16, pytest.approx(time[f"{kind}_s"], rel=1e-5))]
    assert attempt.events("perf/goodput") == [(16, pytest.approx(time["goodput"], rel=1e-5))]
    assert ("\n  ranks " in attempt.log()) == (world_size > 1)
    for rank in range(world_size):
        beat = read_beat(attempt.attempt.beat(rank))
        assert beat is not None
        assert (beat.phase, beat.step, beat.first_step) == (FINISHING, 16, 0)
        assert beat.median_s > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_speed_and_data_wait_are_of_the_steps_alone(tmp_path: Path, world_size: int) -> None:
    attempt = finished(tmp_path, tiny_config(log__every_steps=4), world_size)
    speeds, waits = attempt.events("perf/images_per_sec"), attempt.events("perf/data_wait_fraction")
    assert [step for step, _ in speeds] == [4, 8, 12, 16]
    seconds = [4 * 8 / speed for _, speed in speeds]  # steps of eight images
    time = time_of(attempt)
    assert sum(seconds) == pytest.approx(time["data_s"] + time["compute_s"] + time["waiting_s"], rel=1e-4)
    waited = sum(part * fraction for part, (_, fraction) in zip(seconds, waits, strict=True))
    assert waited == pytest.approx(time["data_s"], rel=1e-4)


def test_attempts_that_were_killed_cost_restarts_and_replayed_steps(tmp_path: Path) -> None:
    config = tiny_config(model=MORTAL, checkpoint__every_steps=3)
    died = ((0, "7"), (6, "4"))  # goes on from, and is killed in this forward pass of the attempt
    for first, call in died:
        killed = run(tmp_path, config, 1, {"DIE_AT": call})
        assert killed.statuses == [-signal.SIGKILL]
        beat = read_beat(killed.attempt.beat(0))
        assert beat is not None
        assert (beat.phase, beat.step, beat.first_step) == (COMPUTE, first + int(call), first)
    time = time_of(finished(tmp_path, config))
    assert time["replayed_steps"] == (7 - 6) + (10 - 9)
    assert time["restarts_s"] > 0
    assert sum(time[f"{kind}_s"] for kind in KINDS) == pytest.approx(time["total_s"])
    alone = time_of(finished(tmp_path / "whole", config))
    assert alone["replayed_steps"] == 0


def test_a_run_that_is_extended_goes_on_with_its_account(tmp_path: Path) -> None:
    first = time_of(finished(tmp_path, tiny_config()))
    second = time_of(finished(tmp_path, tiny_config(max_epochs=3)))
    assert second["startup_s"] == pytest.approx(first["startup_s"])  # the later one is time of a restart
    assert second["restarts_s"] > 0
    assert second["compute_s"] > first["compute_s"]
    assert second["total_s"] > first["total_s"]
    assert second["replayed_steps"] == 0


@pytest.mark.parametrize("mode", ["sharded", "rank0"])
def test_a_beat_says_what_the_rank_is_doing(tmp_path: Path, mode: str) -> None:
    """An evaluation beats at each of its batches: it may last longer than a step may."""
    config = tiny_config(model={"name": "tests.dist.toys:NotesBeat"}, eval__mode=mode, max_epochs=1)
    finished(tmp_path, config, 2, {"BEATS": str(tmp_path / "beats")})
    for rank in range(2):
        lines = Path(f"{tmp_path}/beats.{rank}").read_text().splitlines()
        noted = [(int(phase), int(step), time) for phase, step, time in (line.split() for line in lines)]
        # The pass that settles DDP's buckets, then eight steps, then 23 images in batches of five.
        batches = {"sharded": [3, 2], "rank0": [5, 0]}[mode][rank]
        assert [(phase, step) for phase, step, _ in noted] == [
            (STARTING, 0),
            *((COMPUTE, step) for step in range(8)),
            *[(EVALUATION, 8)] * batches,
        ]
        assert len({time for _, _, time in noted}) == len(noted)


def test_a_rank_that_hangs_writes_its_stacks(tmp_path: Path) -> None:
    attempt = finished(tmp_path, tiny_config(model={"name": "tests.dist.toys:AsksForStacks"}, max_epochs=1))
    assert "most recent call first" in attempt.log()
    assert "in logits" in attempt.log()
