"""Stops and kills: nothing is left running, and what was saved goes on, bit for bit."""

import contextlib
import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.contract import Outcome
from launch.processes import find_process
from launch.signals import SAME_CTRL_C_S
from tests.e2e.commands import ROOT, Command, Place, needs_proc, until
from trainer import checkpoint

pytestmark = needs_proc

HELD = ("model.name=tests.e2e.toys:Held", "model.args={}")
STREAMED = ("data.residency=stream", "data.num_workers=2")
ENDLESS = ("max_epochs=null", "max_steps=1000000", "eval.every_epochs=null", "checkpoint.every_epochs=null")


def test_every_way_to_stop_saves_one_checkpoint_and_goes_on(here: Place) -> None:
    """Two ranks with loader workers: Ctrl-C, SIGTERM to the launcher, SIGTERM to one rank alone."""

    def terminate_rank_1(_: Command) -> None:
        os.kill(int(here.attempt("long", "003").pid(1).read_text()), signal.SIGTERM)

    start = ("train", "tiny.yaml", *ENDLESS, *STREAMED, "--run-name", "long", "--nproc", "2")
    first, again = _stopped(here, "001", start, Command.interrupt, "SIGINT")
    second, again = _stopped(here, "002", again, lambda command: command.process.terminate(), "SIGTERM", first)
    _stopped(here, "003", again, terminate_rank_1, "SIGTERM", second)


def _stopped(
    here: Place, label: str, arguments: tuple[str, ...], stop: Callable[[Command], None], name: str, resumed: int = 0
) -> tuple[int, tuple[str, ...]]:
    """Start, stop in the middle; returns the step it stopped at and what it says to type to go on."""
    command = here.start(*arguments)
    command.until(lambda: _last_step(here.run_dir("long").metrics) > resumed + 3, "a few steps")
    assert len(here.living()) >= 8  # launcher, torchrun, two ranks, four loader workers
    stop(command)
    command.ends_with(130 if name == "SIGINT" else 75)
    until(lambda: here.living() == [], "the end of all that the launcher had started")
    assert list(here.temporary.iterdir()) == []
    last_line = rf"stopped by {name} at step (\d+); checkpoint (\S+); go on with: python -m launch (.*)"
    found = re.fullmatch(last_line, command.lines[-1])
    assert found, command.output
    step, saved = int(found[1]), found[2]
    assert saved == f"step_{step:08d}"
    for rank in (0, 1):
        outcome = Outcome.load(here.attempt("long", label).outcome(rank))
        assert outcome is not None
        assert (outcome.status, outcome.step, outcome.checkpoint) == ("stopped", step, saved)
    checkpoints = [path.name for path in here.run_dir("long").checkpoints.iterdir()]
    assert sorted(checkpoints) == [f"step_{number:08d}" for number in (resumed, step) if number]
    logs = [path.read_text() for path in here.attempt("long", label).logs.iterdir()]
    assert not any("Traceback" in text for text in (command.output, *logs))
    assert resumed == 0 or any(f"step_{resumed:08d}: " in line for line in command.lines if line.startswith("resume "))
    return step, tuple(shlex.split(found[3]))


def _last_step(metrics: Path) -> int:
    """The last step in metrics.jsonl; 0 if there is none, or none that is written out."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


HELD_ANYWHERE = ("model.name=tests.e2e.toys:HeldAnywhere", "data.name=tests.e2e.toys:held_images", "eval.batch_size=7")
# Runs before everything else in a rank, torch not yet imported.
HELD_START = """
import os, sys, time
from pathlib import Path
if "trainer" in sys.orig_argv:
    folder = Path(os.environ["HOLD"])
    (folder / f"held-{os.environ['RANK']}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
"""


def _launcher(_here: Place, command: Command) -> list[int]:
    return [command.process.pid]


def _torchrun(_here: Place, command: Command) -> list[int]:
    return [int(Path(f"/proc/{command.process.pid}/task/{command.process.pid}/children").read_text())]


def _rank_1(here: Place, _command: Command) -> list[int]:
    return [int(here.attempt("held").pid(1).read_text())]


def _everyone(here: Place, _command: Command) -> list[int]:
    return here.living()


# Where each stop comes, what is sent, to whom, at which steps it may stop: the ranks may be one step beyond the signal,
# and those that are held in loading have a few batches that were read ahead.
MOMENTS: dict[str, tuple[signal.Signals, Callable[[Place, Command], list[int]], range]] = {
    "the start": (signal.SIGTERM, _everyone, range(1, 2)),
    "building": (signal.SIGUSR1, _rank_1, range(1, 2)),
    "loading": (signal.SIGHUP, _torchrun, range(1, 6)),
    "an evaluation": (signal.SIGUSR2, _everyone, range(8, 9)),
    "a save": (signal.SIGTERM, _launcher, range(8, 10)),
    "the last step": (signal.SIGUSR1, _everyone, range(16, 17)),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stop_at_any_moment_saves_one_step_of_all_ranks(here: Place, moment: str) -> None:
    number, whom, steps = MOMENTS[moment]
    streamed = STREAMED if moment == "loading" else ()
    environment = {"HOLD_IN": moment}
    if moment == "the start":
        (here.folder / "sitecustomize.py").write_text(HELD_START)
        environment = {"PYTHONPATH": f"{here.folder}:{ROOT}"}
    start = ("train", "tiny.yaml", *HELD_ANYWHERE, "model.args={}", *streamed, "--run-name", "held", "--nproc", "2")
    command = here.start(*start, **environment)
    command.until(here.held(2), "the ranks' wait")
    for pid in whom(here, command):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    if whom is not _rank_1:
        command.until(here.attempt("held").stop_request.exists, "the stop request")
    (here.hold / "go").touch()
    command.ends_with(75)
    until(lambda: here.living() == [], "the end of all that the launcher had started")
    said = rf"stopped by {number.name} at step (\d+); checkpoint (\S+); go on with: python -m launch resume held"
    found = re.fullmatch(said, command.lines[-1])
    assert found, command.output
    step, saved = int(found[1]), found[2]
    assert step in steps
    assert saved == f"step_{step:08d}"
    for rank in (0, 1):
        outcome = Outcome.load(here.attempt("held").outcome(rank))
        assert outcome is not None
        assert (outcome.status, outcome.step, outcome.checkpoint) == ("stopped", step, saved)
    logs = [path.read_text() for path in here.attempt("held").logs.iterdir()]
    assert not any("Traceback" in text for text in (command.output, *logs))
    assert checkpoint.fault_of(here.run_dir("held").checkpoints / saved) is None


def _workers_of(pid: int) -> list[int]:
    """The rank's forks: they have its command line, which `git`, another child, has not."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if b"trainer" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_a_scheduler_that_kills_the_loader_workers_first_loses_no_step(here: Place) -> None:
    start = ("train", "tiny.yaml", *HELD, *STREAMED, "--run-name", "held", "--nproc", "2")
    command = here.start(*start, HOLD_AT="4")
    command.until(here.held(2), "both ranks in their fifth step")
    for rank in (0, 1):
        workers = _workers_of(int(here.attempt("held").pid(rank).read_text()))
        assert len(workers) == 2
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
    command.process.terminate()
    command.until(here.attempt("held").stop_request.exists, "the stop request")
    (here.hold / "go").touch()
    command.ends_with(75)
    assert here.living() == []
    assert re.match(r"stopped by SIGTERM at step [56]; checkpoint step_0000000[56]; ", command.lines[-1])
    logs = [path.read_text() for path in here.attempt("held").logs.iterdir()]
    assert not any("Traceback" in text for text in (command.output, *logs))


def test_a_loader_worker_that_is_killed_ends_the_run_with_the_fix(here: Place) -> None:
    settings = (*HELD, *STREAMED, "checkpoint.every_steps=3")
    command = here.start("train", "tiny.yaml", *settings, "--run-name", "held", "--nproc", "2", HOLD_AT="4")
    command.until(here.held(2), "both ranks in their fifth step")
    victim = _workers_of(int(here.attempt("held").pid(1).read_text()))[0]
    os.kill(victim, signal.SIGKILL)
    until(lambda: find_process(victim) is None, "the worker's end")  # a busy machine takes its time over it
    (here.hold / "go").touch()
    command.ends_with(3)
    assert here.living() == []
    said = (
        rf"environment error: a loader worker \(pid {victim}\) was killed by SIGKILL, usually because memory ran out: "
        r"use fewer data.num_workers, or data.num_workers=0, which reads in the rank itself "
        r"\(rank 1 of 2 at epoch 0 step \d\)"
    )
    assert re.fullmatch(said, command.lines[-3])
    # What was read ahead may still be trained on.
    assert re.fullmatch(r"hint: go on from step_0000000\d with: python -m launch resume held", command.lines[-1])
    assert "Traceback" not in command.output


def test_a_second_ctrl_c_ends_at_once(here: Place) -> None:
    command = here.start("train", "tiny.yaml", *HELD, "launch.grace_s=1000", "--run-name", "stuck", HOLD_AT="9")
    command.until(here.held(1), "a rank that is stuck")
    (refusal,) = here.run("resume", "stuck", code=2).lines
    assert f"run 'stuck' is in use by another launch (pid {command.process.pid})" in refusal
    assert re.search(r"^stuck +running +8$", here.run("runs").output, re.MULTILINE)
    command.interrupt()
    command.until(here.attempt("stuck").stop_request.exists, "the stop request")
    pressed = time.monotonic()
    until(lambda: time.monotonic() > pressed + SAME_CTRL_C_S, "a press that counts as another one")
    command.interrupt()
    command.ends_with(130)
    assert here.living() == []
    assert list(here.temporary.iterdir()) == []
    stopped, hint = command.lines[-2:]
    assert stopped == "stopped by SIGINT: second Ctrl-C, all processes were killed"
    assert hint == "hint: go on from step_00000008 with: python -m launch resume stuck"
    assert "Traceback" not in command.output


def test_nothing_outlives_a_killed_launcher(here: Place) -> None:
    command = here.start("train", "tiny.yaml", *HELD, *STREAMED, "--run-name", "x", "--nproc", "2", HOLD_AT="2")
    command.until(here.held(2), "two ranks that are stuck")
    assert len(here.living()) >= 8
    command.process.kill()
    command.ends_with(-signal.SIGKILL)
    until(lambda: here.living() == [], "the end of all that the launcher had started")
    assert re.search(r"^x +killed$", here.run("runs").output, re.MULTILINE)


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_killed_run_goes_on_bit_for_bit(here: Place, nproc: str) -> None:
    """A SIGKILL of everything at once; with one process the newest checkpoint is damaged as well."""
    settings = ("train", "tiny.yaml", *HELD, "checkpoint.every_steps=3", "optim.name=adam", "optim.momentum=0")
    whole = here.start(*settings, "--run-name", "whole", "--nproc", nproc)
    start_cut = (*settings, "--run-name", "cut", "--nproc", nproc)
    killed = here.start(*start_cut, HOLD_AT="13")
    killed.until(here.held(int(nproc)), "all ranks in their 14th step")
    whole.ends_with(0)
    here.kill_all()
    cut, saved = here.run_dir("cut"), "step_00000012"
    if nproc == "1":
        largest = max((cut.checkpoints / saved).iterdir(), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
        resumed = here.run("resume", "cut")
        said = rf"^skipped \S+/{saved}: {largest.name} has [\d,]+ of [\d,]+ bytes$"
        assert re.search(said, resumed.output, re.MULTILINE)
        saved = "step_00000009"
    else:
        resumed = here.run(*start_cut)
    assert re.search(rf"^resume +{saved}: epoch 1, step {int(saved[5:])}$", resumed.output, re.MULTILINE)
    assert cut.weights.read_bytes() == here.run_dir("whole").weights.read_bytes()
    assert _metrics(cut.metrics) == _metrics(here.run_dir("whole").metrics)
    assert [line["step"] for line in _metrics(cut.metrics) if "train/loss" in line] == list(range(1, 17))
    assert len(list(cut.path.glob("events.out.tfevents.*"))) == 2  # of one run, in its own folder
    assert list(here.temporary.iterdir()) == []


def _metrics(path: Path) -> list[dict[str, float]]:
    """All but the speeds."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]
