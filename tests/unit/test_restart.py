"""Whether a run that failed is started again: histories, and what comes of them."""

from typing import Any

import pytest

from configs.sections import LaunchConfig
from launch.restart import HOPELESS, Decision, Failure, Restart, judge, summary

KILLED = "killed by SIGKILL (out of memory?)"
MEMORY = Failure("OutOfMemoryError", "OutOfMemoryError: Tried to allocate 2.00 GiB", 1, 3)


def killed(step: int | None, **more: Any) -> Failure:
    return Failure(KILLED, KILLED, 1, step, **more)


def raised(kind: str, message: str, step: int | None = 7, code: int = 1) -> Failure:
    return Failure(kind, f"{kind}: {message}", 0, step, exit_code=code)


def decide(*failures: Failure, micro_batch: int = 8, **launch: Any) -> Decision:
    return judge(failures, LaunchConfig.model_validate({"max_restarts": 3} | launch), micro_batch)


def test_nothing_is_restarted_or_said_unless_asked_for() -> None:
    assert decide(killed(7), max_restarts=0) == Decision(again=False)


def test_a_killed_rank_is_restarted_as_often_as_was_asked_for() -> None:
    steps = [killed(7), killed(9), killed(11), killed(13)]
    assert decide(steps[0]) == Decision(again=True, why="restart 1 of 3 in 1 s", wait_s=1.0)
    assert decide(*steps[:3]).why == "restart 3 of 3 in 4 s"
    last = decide(*steps)
    assert (last.again, last.why) == (False, "not restarted: 3 restarts (launch.max_restarts) did not help")


@pytest.mark.parametrize(
    ("first", "waits"), [(1.0, [1, 2, 4, 8, 16, 32, 60, 60]), (0.0, [0] * 8), (45.0, [45, 60, 60]), (1e308, [60, 60])]
)
def test_waits_double_up_to_a_minute(first: float, waits: list[float]) -> None:
    failures = [killed(step) for step in range(len(waits))]
    found = [
        decide(*failures[: number + 1], max_restarts=100, restart_wait_s=first).wait_s for number in range(len(waits))
    ]
    assert found == waits


def test_a_hundred_thousand_restarts_do_not_overflow() -> None:
    assert decide(*map(killed, range(1200)), max_restarts=2000).wait_s == 60


@pytest.mark.parametrize("code", [2, 3])
def test_what_the_user_has_to_put_right_is_never_tried_again(code: int) -> None:
    decision = decide(raised("config error", "no such model", None, code))
    assert (decision.again, decision.why) == (False, "not restarted: this has to be put right first")


@pytest.mark.parametrize("kind", ["ModuleNotFoundError", "SyntaxError", "TypeError", "training error"])
def test_mistakes_are_never_tried_again(kind: str) -> None:
    assert kind in HOPELESS
    assert decide(raised(kind, "what", None)).why == "not restarted: it would end in the same way again"


@pytest.mark.parametrize("kind", ["peer", "ValueError", "RuntimeError", "OSError"])
def test_others_get_one_more_try(kind: str) -> None:
    assert decide(raised(kind, "what")).again


@pytest.mark.parametrize(
    ("first", "second", "again"),
    [
        (killed(7), killed(7), False),
        (killed(7), killed(8), True),
        (killed(None), killed(None), False),
        (killed(7), raised("ValueError", "boom"), True),
        (raised("ValueError", "boom"), raised("ValueError", "bang"), True),
        (
            raised("ValueError", "pid 12 at 0x7fA0, 3 left"),
            raised("ValueError", "pid 4711 at 0x7f00bc, 25 left"),
            False,
        ),
        (Failure("exit code 7", "exit code 7", 1, 7), Failure("exit code 9", "exit code 9", 1, 7), True),
    ],
)
def test_the_same_cause_at_the_same_step_is_not_tried_twice(first: Failure, second: Failure, again: bool) -> None:
    assert decide(first, second).again == again
    assert decide(first, raised("OSError", "in between", 99), second).again == again


def test_the_repeated_step_is_told() -> None:
    assert decide(killed(7), killed(7)).why == "not restarted: the same has happened before, at step 7"
    assert decide(killed(None), killed(None)).why.endswith("before, before its first step")


@pytest.mark.parametrize(("before", "after"), [(8, 4), (5, 3), (3, 2), (2, 1)])
def test_out_of_memory_halves_the_micro_batch_and_costs_no_restart(before: int, after: int) -> None:
    expected = Decision(again=True, why="restart", max_micro_batch=after)
    assert decide(MEMORY, micro_batch=before, max_restarts=0) == expected
    assert decide(MEMORY, MEMORY, MEMORY, micro_batch=before, max_restarts=0) == expected  # the same step, less memory
    assert decide(MEMORY, MEMORY, killed(7)).why == "restart 1 of 3 in 1 s"


def test_out_of_memory_that_no_smaller_micro_batch_can_help() -> None:
    of_one = decide(MEMORY, micro_batch=1)
    assert not of_one.again
    assert of_one.why.startswith("not restarted: the micro-batch is one sample already; ")
    of_a_pair = judge([MEMORY], LaunchConfig(), 2, 2)
    assert not of_a_pair.again
    assert "the micro-batch is 2 samples that are mixed with each other already; " in of_a_pair.why
    assert judge([MEMORY], LaunchConfig(), 4, 2).max_micro_batch == 2
    at_build = decide(Failure("OutOfMemoryError", "OutOfMemoryError", 0))
    assert (at_build.again, at_build.max_micro_batch) == (False, None)
    assert at_build.why == "not restarted: it did not fit before the first sample was seen"


def test_a_restart_is_announced_summed_up_and_written_down() -> None:
    exact = Restart("001", killed(42), 40, 2.0)
    assert exact.announce(decide(killed(42))) == (
        "restart 1 of 3 in 1 s: from step_00000040 (2 steps will be replayed)"
    )
    vague = Restart("002", raised("ValueError", "boom", 1), None, 4.0)
    assert summary([]) == []
    assert summary([exact, vague]) == [
        "2 restarts:",
        f"  attempt 001 ended at step 42, rank 1: {KILLED}; went on from step_00000040, 2 steps replayed",
        "  attempt 002 ended at step 1, rank 0: ValueError: boom; went on from the beginning, 1 step replayed",
    ]
    facts = exact.facts()
    assert (facts["after"], facts["checkpoint_step"], facts["steps_replayed"]) == ("001", 40, 2)
    assert (facts["failure"]["rank"], facts["failure"]["step"]) == (1, 42)


@pytest.mark.parametrize(
    ("failure", "checkpoint", "steps", "words"),
    [
        (killed(42), 42, 0, "0 steps replayed"),
        (killed(42), 40, 2, "2 steps replayed"),
        (killed(None), 40, 0, "0 steps replayed"),  # whatever is done again was lost by an attempt before
        (killed(None), None, 0, "0 steps replayed"),
    ],
)
def test_steps_replayed(failure: Failure, checkpoint: int | None, steps: int, words: str) -> None:
    restart = Restart("001", failure, checkpoint, 1.0)
    assert restart.steps_replayed == steps
    assert restart.describe().endswith(words)
