"""Ranks that do not arrive: each way is a sentence of its own, with the place, and nothing waits for ever."""

import json
import re

import pytest

from tests.e2e.commands import Place, needs_proc

pytestmark = needs_proc

HANGS = {
    "sleeps for ever": (
        ("faults=[{kind: hang, rank: 1, step: 3}]",),
        r"rank 1 of 2 hangs at step 3: in \S+/faults\.py:\d+ _hang \(waited \d+ s, launch\.hang_timeout_s\)",
        ("in backward", "in _hang"),
    ),
    "is stopped": (
        ("faults=[{kind: sigstop, rank: 1, step: 3}]",),
        r"rank 1 was stopped \(SIGSTOP\) at step 3; the others waited \d+ s for it; "
        "continue a stopped process with kill -CONT",
        ("in backward", None),
    ),
    "is in another collective": (
        ("model.name=tests.dist.toys:TakesAnotherTurn", "model.args={rank: 1, step: 3}"),
        r"the ranks wait for each other: rank 1 at step 3 in \S+/toys\.py:\d+ act, "
        r"rank 0 at step 3 with its own gradients computed \(waited \d+ s, launch\.hang_timeout_s\)",
        ("in backward", "in barrier"),
    ),
}


@pytest.mark.parametrize("how", HANGS)
def test_the_rank_that_did_not_arrive_is_named_with_its_place(here: Place, how: str) -> None:
    settings, sentence, functions = HANGS[how]
    limits = ("launch.hang_timeout_s=5", "checkpoint.every_steps=2")
    failed = here.run("train", "tiny.yaml", *settings, *limits, "--run-name", "hung", "--nproc", "2", code=1)
    assert here.living() == []
    (cause,) = re.findall(r"^FAILED: (.*)$", failed.last_lines, re.MULTILINE)
    assert re.fullmatch(sentence, cause), failed.output
    for rank, function in enumerate(functions):
        log = here.attempt("hung").rank_log(rank).read_text()
        assert ("most recent call first" in log) == (function is not None)
        assert (function or "") in log
    (log,) = re.findall(r"^log: (.*)$", failed.last_lines, re.MULTILINE)
    assert (here.folder / log).is_file()
    assert failed.lines[-1] == "hint: go on from step_00000002 with: python -m launch resume hung"
    assert "most recent call first" not in failed.output
    assert list(here.temporary.iterdir()) == []


def test_a_rank_that_hangs_in_start_up(here: Place) -> None:
    settings = ("data.name=tests.dist.toys:images_that_rank_1_waits_for", "launch.hang_timeout_s=1.5")
    failed = here.run("train", "tiny.yaml", *settings, "--run-name", "hung", "--nproc", "2", code=1)
    said = r"^FAILED: rank 1 of 2 hangs in start-up: in \S+/toys\.py:\d+ images_that_rank_1_waits_for "
    assert re.search(said + r"\(waited \d+ s, 10 times launch\.hang_timeout_s\)$", failed.output, re.MULTILINE)


def test_a_loader_worker_that_hangs_is_named_with_the_function_it_hangs_in(here: Place) -> None:
    streamed = ("data.name=tests.dist.toys:fatal_images", "data.residency=stream", "data.num_workers=2")
    fatal = {"FATAL": "40", "FATAL_DOES": "hang"}
    failed = here.run("train", "tiny.yaml", *streamed, "launch.hang_timeout_s=2", "--run-name", "hung", code=1, **fatal)
    said = r"^FAILED: rank 0 of 1 hangs .*: in \S+/toys\.py:\d+ act of a loader worker \(waited \d+ s, "
    assert re.search(said, failed.output, re.MULTILINE), failed.output
    assert here.living() == []


def test_a_slow_rank_is_noted_and_told_at_the_end_and_the_run_goes_on(here: Place) -> None:
    fault = "faults=[{kind: slow, rank: 1, step: 8, seconds: 15}]"
    done = here.run("train", "tiny.yaml", fault, "--run-name", "slow", "--nproc", "2")
    notes = [line for line in done.lines if line.startswith("note: rank")]
    assert len(notes) == 1
    said = r"note: rank 1 is slow: its step 8 has taken 1\d s, the median is \S+ s; the others wait for it"
    assert re.fullmatch(said, notes[0])
    ranks = [line.split(maxsplit=1)[1] for line in done.lines if line.startswith("  ranks ")]
    assert [line.split(":")[0] for line in ranks] == ["rank 1", "rank 0"]
    assert ranks[0].endswith("(slowest)")
    time = json.loads(here.run_dir("slow").result.read_text())["time"]
    assert time["waiting_s"] > 5  # of rank 0
    assert re.search(r"^  time +start-up \d+\.\d s  data .* goodput \d+ %$", done.output, re.MULTILINE)
