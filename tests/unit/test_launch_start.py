"""From one attempt to the next, with attempts that are only pretended."""

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.loader import load_config
from configs.run_dir import AttemptDir, RunDir, step_name
from launch import attempts as to_the_end
from launch import start
from launch.options import Options
from launch.plan import LaunchPlan
from launch.report import Verdict
from launch.restart import Failure
from launch.run_folder import NameRequest
from launch.signals import STOP_SIGNALS, StopSignals

KILLED = Failure("killed", "killed by SIGKILL", 1, 7)
Attempt = Callable[[RunDir, AttemptDir], Verdict]


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Launcher:
    """Trains in a folder of its own; each attempt does what the next of `attempts` does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.options = folder, Options(cwd=folder, runs=folder)
        self.run = RunDir(folder / "x")
        self.run.path.mkdir()
        self.attempts: list[Attempt] = []
        monkeypatch.setattr(to_the_end, "attempt_once", self._attempt)

    def train(self, *attempts: Attempt, **launch: Any) -> int:
        self.attempts = list(attempts)
        (self.folder / "x.yaml").write_text("max_epochs: 2\nglobal_batch_size: 8\ndevice: cpu\n")
        settings = [f"launch.{name}={value}" for name, value in launch.items()]
        self.job = start._plan_training(
            lambda: load_config(self.folder / "x.yaml", settings), NameRequest("x", "x"), self.options
        )
        code = to_the_end.train(self.job, self.run, self.options)
        assert self.attempts == []
        return code

    def _attempt(
        self, job: Any, run: RunDir, attempt: AttemptDir, options: Options, signals: StopSignals, *, is_first: bool
    ) -> tuple[LaunchPlan, Verdict]:
        signals.note()
        assert is_first == (attempt.path.name == "001")
        return dataclasses.replace(job.plan, attempt=attempt), self.attempts.pop(0)(run, attempt)


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    return Launcher(tmp_path, monkeypatch)


def ends(code: int, failure: Failure | None = None, *numbers: int) -> Attempt:
    """An attempt during which the launcher gets these signals."""

    def attempt(run: RunDir, folder: AttemptDir) -> Verdict:
        for number in numbers:
            os.kill(os.getpid(), number)
        lines = ["FAILED: what", "hint: go on"] if failure else []
        return Verdict(code, lines, to_stderr=failure is not None, failure=failure)

    return attempt


def test_a_failure_is_followed_by_another_attempt(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    (launcher.run.checkpoints / step_name(5)).mkdir(parents=True)
    assert launcher.train(ends(1, KILLED), ends(0), max_restarts=1, restart_wait_s=0) == 0
    said = capsys.readouterr()
    assert said.err == "FAILED: what\n"
    assert said.out.splitlines()[0] == "restart 1 of 1 in 0 s: from step_00000005 (2 steps will be replayed)"
    assert said.out.splitlines()[1:] == [
        "1 restart:",
        "  attempt 001 ended at step 7, rank 1: killed by SIGKILL; went on from step_00000005, 2 steps replayed",
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_stop_while_an_attempt_fails_is_not_lost(launcher: Launcher, number: int, code: int) -> None:
    assert launcher.train(ends(1, KILLED, number), max_restarts=1, restart_wait_s=60) == code
    for again in STOP_SIGNALS:  # and once it has ended, nothing is changed any more
        os.kill(os.getpid(), again)


@pytest.mark.parametrize(("failure", "max_restarts"), [(KILLED, 0), (dataclasses.replace(KILLED, exit_code=3), 1)])
def test_a_stop_does_not_hide_a_failure_that_ends_the_run(
    launcher: Launcher, failure: Failure, max_restarts: int
) -> None:
    attempt = ends(failure.exit_code, failure, signal.SIGTERM)
    assert launcher.train(attempt, max_restarts=max_restarts) == failure.exit_code


def test_the_end_of_a_run_without_restarts_is_told_as_ever(
    launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launcher.train(ends(1, KILLED)) == 1
    assert capsys.readouterr().err.splitlines() == ["FAILED: what", "hint: go on"]


def test_new_settings_that_were_not_committed_come_along(launcher: Launcher) -> None:
    """The ranks make them the run's own once they fit; the first attempt did not get there."""
    launcher.run.config.write_text("max_epochs: 9\nglobal_batch_size: 8\ndevice: cpu\n")

    def brings_settings(run: RunDir, attempt: AttemptDir) -> Verdict:
        assert load_config(attempt.config).config.max_epochs == 2
        return ends(1 if attempt.path.name == "001" else 0, KILLED if attempt.path.name == "001" else None)(
            run, attempt
        )

    assert launcher.train(brings_settings, brings_settings, max_restarts=1, restart_wait_s=0) == 0
