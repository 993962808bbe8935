"""The last words on the screen, from fabricated outcome files."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from configs.beat import COMPUTE, LAYOUT
from configs.contract import Outcome, WorkerPlan
from configs.run_dir import RunDir
from configs.schema import RunConfig
from launch.plan import LaunchPlan
from launch.report import Verdict, conclude, stopped_between
from launch.restart import Failure
from launch.signals import signal_words
from launch.supervise import Ending
from launch.watch import Hang

RESUME = "make resume RUN=demo"


def plan_of(tmp_path: Path, world_size: int) -> LaunchPlan:
    attempt = RunDir(tmp_path / "runs/demo").attempt("001")
    attempt.logs.mkdir(parents=True)
    worker = WorkerPlan(
        mode="train",
        config=RunConfig(max_epochs=1, global_batch_size=8),
        launcher="direct" if world_size == 1 else "torchrun",
        device="cpu",
        world_size=world_size,
        local_world_size=world_size,
        threads_per_rank=1,
    )
    for rank in range(world_size):
        attempt.pid(rank).write_text(str(4242 + rank))
    return LaunchPlan(worker, "", "", 1, 0, [], {}, [], {}, attempt, tmp_path, [])


def outcome(plan: LaunchPlan, rank: int, status: Any, time: float = 1.0, **fields: Any) -> None:
    Outcome(rank=rank, status=status, time=time, **fields).save(plan.attempt.outcome(rank))


def judged(plan: LaunchPlan, code: int = 1, **ending: Any) -> Verdict:
    return conclude(plan, Ending(code, **ending), RESUME)


def test_all_done_says_nothing(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 2)
    for rank in range(2):
        outcome(plan, rank, "done")
    assert judged(plan, 0, signal="SIGTERM") == Verdict(0, [], to_stderr=False)


def test_the_cause_is_told_and_not_its_victim(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 2)
    outcome(plan, 0, "failed", 1.0, exit_code=1, step=3, epoch=0, kind="peer", message="connection closed")
    outcome(
        plan,
        1,
        "failed",
        2.0,
        exit_code=1,
        step=3,
        epoch=0,
        kind="ValueError",
        message="boom-731",
        where="tests/x.py:57",
    )
    assert judged(plan).exit_code == 1
    assert judged(plan).lines == [
        "FAILED: rank 1 of 2 (pid 4243) at epoch 0 step 3: ValueError: boom-731 (tests/x.py:57)",
        "rank 0 stopped because of it",
        "log: runs/demo/attempts/001/logs/rank1.log",
    ]


def test_only_the_first_of_several_failures_is_told(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 3)
    for rank, time in ((0, 5.0), (1, 3.0), (2, 4.0)):
        outcome(plan, rank, "failed", time, exit_code=2, kind="checkpoint error", message="another architecture")
    said = "checkpoint error: another architecture"
    assert judged(plan) == Verdict(2, [said], failure=Failure("checkpoint error", said, 1, exit_code=2))


def test_a_checkpoint_to_go_on_from_is_the_hint(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 1)
    for name in ("step_00000009", "step_00000120", ".tmp_step_00000200", "best_step_00000300"):
        (tmp_path / "runs/demo/checkpoints" / name).mkdir(parents=True)
    outcome(plan, 0, "failed", exit_code=3, kind="environment error", message="disk full", step=125, epoch=1)
    assert judged(plan).exit_code == 3
    assert judged(plan).lines[0] == "environment error: disk full (rank 0 of 1 at epoch 1 step 125)"
    assert judged(plan).lines[-1] == f"hint: go on from step_00000120 with: {RESUME}"


def test_out_of_memory_has_its_own_hint(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 1)
    fields = {"exit_code": 1, "kind": "OutOfMemoryError", "message": "CUDA out of memory. Tried to ..."}
    outcome(plan, 0, "failed", step=3, **fields)
    hints = [line for line in judged(plan).lines if line.startswith("hint: ")]
    assert len(hints) == 1
    assert "max_per_device_batch_size" in hints[0]
    outcome(plan, 0, "failed", **fields)  # before training: what goes through the network is not to blame
    assert judged(plan).hints == []
    outcome(plan, 0, "failed", step=3, **fields)
    of_one = dataclasses.replace(plan, worker=dataclasses.replace(plan.worker, max_micro_batch=1))
    assert judged(of_one).hints == []


AGENT_FIRST_LINE = "E1130 api.py:1002] failed (exitcode: {code}) local_rank: 1 (pid: 4243) of binary: python\n"
AGENT_SUMMARY = (
    "[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 4242)\n[0]:\n  exitcode  : {code} (pid: 4243)\n"
)


@pytest.mark.parametrize(
    ("report", "code", "words"),
    [
        (AGENT_FIRST_LINE, -9, "killed by SIGKILL (out of memory?)"),
        (AGENT_SUMMARY, -7, "killed by SIGBUS (/dev/shm too small?)"),
        (AGENT_SUMMARY, 7, "exit code 7"),
    ],
)
def test_a_rank_that_died_without_a_word(tmp_path: Path, report: str, code: int, words: str) -> None:
    plan = plan_of(tmp_path, 2)
    plan.attempt.agent_log.write_text(report.format(code=code))
    outcome(plan, 0, "failed", exit_code=1, kind="peer", message="connection closed")
    assert judged(plan, died={1: 9.0}).lines[0] == f"FAILED: rank 1 of 2 (pid 4243): {words}"
    assert "connection closed" not in "\n".join(judged(plan, died={1: 9.0}).lines)


def test_of_several_dead_ranks_the_one_that_torchrun_ended_is_not_the_cause(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 2)
    plan.attempt.agent_log.write_text(AGENT_SUMMARY.format(code=-11))
    assert judged(plan, died={0: 9.0, 1: 9.1}).lines[0].startswith("FAILED: rank 1 of 2 (pid 4243): killed by SIGSEGV")


def test_the_error_in_the_log_of_a_dead_rank_is_shown(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 1)
    plan.attempt.rank_log(0).write_text("step 1\nTraceback ...\nModuleNotFoundError: No module named 'nothing'\nbye\n")
    lines = judged(plan, 1, died={0: 9.0}).lines
    assert lines[0] == "FAILED: rank 0 of 1 (pid 4242): exit code 1"
    assert lines[1] == "its last line: ModuleNotFoundError: No module named 'nothing'"


@pytest.mark.parametrize(("rank", "log"), [(1, 1), (None, 0)])
def test_a_hang_is_told_whatever_its_victims_say(tmp_path: Path, rank: int | None, log: int) -> None:
    plan = plan_of(tmp_path, 2)
    outcome(plan, 0, "failed", exit_code=1, kind="peer", message="connection closed", step=7, epoch=0)
    assert judged(plan, -9, killed="hang", hang=Hang(rank, 7, "nobody came")) == Verdict(
        1,
        [
            "FAILED: nobody came",
            f"log: runs/demo/attempts/001/logs/rank{log}.log",
            "stacks: at the end of each rank's log in runs/demo/attempts/001/logs",
        ],
        failure=Failure("hang", "nobody came", rank, 7),
    )


@pytest.mark.parametrize(("seen", "rank"), [(1.9, 1), (2.1, 0)])
def test_what_fails_after_a_death_failed_because_of_it(tmp_path: Path, seen: float, rank: int) -> None:
    """Also where the victim's error is not known to be one, as a CUDA error after a lost peer."""
    plan = plan_of(tmp_path, 2)
    outcome(plan, 0, "failed", 2.0, exit_code=1, kind="RuntimeError", message="something went away")
    lines = judged(plan, died={1: seen}).lines
    assert lines[0].startswith(f"FAILED: rank {rank} of 2 ")
    assert ("rank 0 stopped because of it" in lines) == (rank == 1)


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (3, 3), (7, 1), (-9, 1)])
def test_a_rank_that_could_not_write_its_outcome_still_tells_by_its_exit_code(
    tmp_path: Path, code: int, expected: int
) -> None:
    assert judged(plan_of(tmp_path, 1), code, died={0: 9.0}).exit_code == expected


def test_a_silent_rank_that_we_killed_is_not_called_out_of_memory(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 2)
    outcome(
        plan,
        0,
        "failed",
        exit_code=1,
        step=3,
        epoch=0,
        kind="peer",
        message="rank 1 did not arrive at step 3 within 10 s",
    )
    line = judged(plan, -9, killed="failure").lines[0]
    assert line == "FAILED: rank 0 of 2 (pid 4242) at epoch 0 step 3: rank 1 did not arrive at step 3 within 10 s"


def test_torchrun_that_never_started_a_rank(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 2)
    for rank in range(2):
        plan.attempt.pid(rank).unlink()
    plan.attempt.agent_log.write_text("Traceback\nModuleNotFoundError: No module named 'torch'\n")
    lines = judged(plan, 1).lines
    assert lines[0] == "FAILED: torchrun ended before any rank had started: exit code 1"
    assert "No module named 'torch'" in lines[1]
    several = dataclasses.replace(plan, nnodes=2)
    assert conclude(several, Ending(1), RESUME).lines[-1].startswith("hint: this was node 0 of 2")


@pytest.mark.parametrize(("signal", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_clean_stop(tmp_path: Path, signal: str, code: int) -> None:
    plan = plan_of(tmp_path, 2)
    for rank in range(2):
        outcome(plan, rank, "stopped", step=41, signal=signal, checkpoint="step_00000041")
    line = f"stopped by {signal} at step 41; checkpoint step_00000041; go on with: {RESUME}"
    assert judged(plan, 0) == Verdict(code, [line], to_stderr=False)


def test_a_signal_that_only_one_rank_got_is_named(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 2)
    for rank, signal in enumerate([None, "SIGUSR1"]):
        outcome(plan, rank, "stopped", step=41, signal=signal, checkpoint="step_00000041")
    verdict = judged(plan, 0)
    assert verdict.exit_code == 75
    assert verdict.lines[0].startswith("stopped by SIGUSR1 at step 41; ")


def test_a_stop_that_took_too_long(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 2)
    outcome(plan, 0, "stopped", step=41, signal="SIGTERM")
    verdict = judged(plan, -9, signal="SIGTERM", killed="grace")
    assert verdict.exit_code == 75
    assert "not done after 30 s" in verdict.lines[0]
    forced = judged(plan, -9, signal="SIGTERM", killed="second Ctrl-C")
    assert forced.exit_code == 130


def test_a_save_that_fails_while_stopping_is_a_failure(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 1)
    outcome(plan, 0, "failed", exit_code=3, kind="environment error", message="disk full", step=4, epoch=0)
    assert judged(plan, 3, signal="SIGTERM").exit_code == 3


def test_signal_words() -> None:
    assert signal_words(7) == "exit code 7"
    assert signal_words(-15) == "killed by SIGTERM"
    assert signal_words(-99) == "killed by signal 99"


def beat(plan: LaunchPlan, rank: int, step: int, first_step: int = 0) -> None:
    """The last that was heard of a rank."""
    plan.attempt.beat(rank).write_bytes(LAYOUT.pack(COMPUTE, step, 9.0, 0.0, first_step, 1.0))


def test_a_failure_is_handed_on_to_be_judged(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 2)
    outcome(plan, 0, "failed", 3.0, exit_code=1, step=7, kind="peer", message="connection closed")
    outcome(plan, 1, "failed", 2.0, exit_code=1, step=7, kind="ValueError", message="boom\nand more")
    assert judged(plan).failure == Failure("ValueError", "ValueError: boom", 1, 7)


def test_a_killed_rank_is_where_those_were_who_waited_for_it(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 2)
    plan.attempt.agent_log.write_text(AGENT_SUMMARY.format(code=-9))
    outcome(plan, 0, "failed", exit_code=1, step=7, kind="peer", message="connection closed")
    words = "killed by SIGKILL (out of memory?)"
    assert judged(plan, died={1: 0.9}).failure == Failure(words, words, 1, 7)


@pytest.mark.parametrize(("step", "first_step", "told"), [(6, 4, 6), (4, 4, 4), (0, -1, None)])
def test_of_a_process_that_was_killed_its_last_beat_is_known(
    tmp_path: Path, step: int, first_step: int, told: int | None
) -> None:
    plan = plan_of(tmp_path, 1)
    beat(plan, 0, step, first_step)
    verdict = judged(plan, -9, died={0: 9.0})
    assert verdict.failure is not None
    assert verdict.failure.step == told
    assert (f" at step {told}: " in verdict.lines[0]) == (told is not None)


def test_a_killed_rank_is_where_it_was_itself_not_where_others_got_to(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 2)
    plan.attempt.agent_log.write_text(AGENT_SUMMARY.format(code=-9))
    beat(plan, 0, 8)
    beat(plan, 1, 7)
    outcome(plan, 0, "failed", exit_code=1, step=8, kind="peer", message="connection closed")
    failure = judged(plan, died={1: 0.9}).failure
    assert failure is not None
    assert failure.step == 7


def test_a_mistake_in_the_code_of_a_silent_rank_is_known_by_its_class(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 1)
    plan.attempt.rank_log(0).write_text("Traceback ...\nModuleNotFoundError: No module named 'nothing'\n")
    failure = judged(plan, 1, died={0: 9.0}).failure
    assert failure is not None
    assert failure.kind == "ModuleNotFoundError"


def test_a_stop_is_no_failure(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 1)
    assert judged(plan, -9, signal="SIGTERM", killed="grace").failure is None
    outcome(plan, 0, "stopped", step=41, signal="SIGTERM", checkpoint="step_00000041")
    assert judged(plan, 0).failure is None


@pytest.mark.parametrize(("signal", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_stop_between_two_attempts(signal: str, code: int) -> None:
    verdict = stopped_between(signal, 40, RESUME)
    assert verdict.exit_code == code
    said = f"stopped by {signal} before the restart; checkpoint step_00000040; go on with: {RESUME}"
    assert verdict.lines == [said]
    assert "no checkpoint" in stopped_between(signal, None, RESUME).lines[0]
