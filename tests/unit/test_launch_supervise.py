"""The watch over the ranks, with ranks and an agent that need no torch: start, stop, failure, nothing left running."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.contract import WorkerPlan
from configs.run_dir import RunDir
from configs.schema import RunConfig
from launch import attempts, supervise
from launch.follow import LogFollower
from launch.options import Options
from launch.plan import LaunchPlan
from launch.processes import find_process, is_alive, kill_tree
from launch.report import conclude
from launch.signals import STOP_SIGNALS, StopSignals, raise_on_stop
from launch.supervise import Ending, read_pids, run_attempt

# What trainer promises the launcher: own log, handlers, beat, pid file, look for a stop request, outcome.
RANK = (
    f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
"""
    + """
from configs.beat import COMPUTE, LAYOUT, WAITING, open_beat
import faulthandler, json, os, signal, sys, time
from pathlib import Path
attempt, rank, what, world_size = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
log = os.open(attempt / "logs" / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1), os.dup2(log, 2)
asked = []
def ask(number, frame):
    asked.append(signal.Signals(number).name)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN if what == "deaf" else ask)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)
beat = open_beat(attempt / f"beat-rank{rank}")
phase = COMPUTE if what in ("hang", "halt") else WAITING
def stuck():
    while True:
        time.sleep(1)
(attempt / f"pid-rank{rank}").write_text(str(os.getpid()))
while len(list(attempt.glob("pid-rank*"))) < world_size:  # or one would be idle before another has begun
    time.sleep(0.01)
LAYOUT.pack_into(beat, 0, phase, 7, time.time(), 0.01, 0, time.time())
if (attempt / "stop.json").exists():
    asked.append(json.loads((attempt / "stop.json").read_text())["signal"])
def end(code, **outcome):
    aside = attempt / f".outcome{rank}"
    aside.write_text(json.dumps({"rank": rank, "time": time.time(), "exit_code": code, **outcome}))
    aside.rename(attempt / f"outcome-rank{rank}.json")
    os._exit(code)
print(f"hello from rank {rank}", flush=True)
if what == "kill":
    os.kill(os.getpid(), 9)
if what == "raise":
    end(1, status="failed", step=3, epoch=0, kind="ValueError", message="boom-731")
if what == "hang":
    stuck()
if what == "halt":
    os.kill(os.getpid(), signal.SIGSTOP)
if what == "done":
    end(0, status="done")
while not asked:
    time.sleep(0.01)
end(0, status="stopped", step=41, signal=asked[0], checkpoint="step_00000041")
"""
)

# As torchrun's: its ranks are in sessions of their own, and it waits for all of them.
AGENT = """
import os, subprocess, sys
from pathlib import Path
(Path(sys.argv[2]) / "agent").write_text(str(os.getpid()))
script, attempt, *does = sys.argv[1:]
ranks = [
    subprocess.Popen([sys.executable, script, attempt, str(rank), what, str(len(does))], start_new_session=True)
    for rank, what in enumerate(does)
]
sys.exit(1 if any([rank.wait() for rank in ranks]) else 0)
"""


@pytest.fixture(autouse=True)
def _quick_and_clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(supervise, "AFTER_FAILURE_S", 0.2)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def plan_of(tmp_path: Path, *ranks: str, **launch: Any) -> LaunchPlan:
    """One rank directly, several below an agent; each does what its word says."""
    attempt = RunDir(tmp_path / "runs/demo").attempt("001")
    attempt.logs.mkdir(parents=True)
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "agent.py").write_text(AGENT)
    command = [str(tmp_path / "agent.py"), str(tmp_path / "rank.py"), str(attempt.path), *ranks]
    if len(ranks) == 1:
        command = [str(tmp_path / "rank.py"), str(attempt.path), "0", ranks[0], "1"]
    worker = WorkerPlan(
        mode="train",
        config=RunConfig.model_validate({"max_epochs": 1, "global_batch_size": 8, "launch": launch}),
        launcher="direct" if len(ranks) == 1 else "torchrun",
        device="cpu",
        world_size=len(ranks),
        local_world_size=len(ranks),
        threads_per_rank=1,
    )
    return LaunchPlan(worker, "", "", 1, 0, [sys.executable, *command], {}, [], {}, attempt, tmp_path, [])


class Console(io.BytesIO):
    """Sends signals to this process, or to all that `pids` gives, once every rank has a pid file and 0 is heard."""

    def __init__(self, plan: LaunchPlan, *numbers: int, pids: Callable[[], list[int]] | None = None) -> None:
        super().__init__()
        self._plan, self._numbers, self._pids = plan, numbers, pids or (lambda: [os.getpid()])

    def write(self, data: Any) -> int:
        while len(read_pids(self._plan.attempt)) < self._plan.worker.world_size:
            time.sleep(0.01)
        for number in self._numbers:
            for pid in self._pids():
                os.kill(pid, number)
            time.sleep(0.25)  # two Ctrl-C within 0.2 s count as one
        return super().write(data)


def run(plan: LaunchPlan, out: io.BytesIO | None = None) -> tuple[Ending, list[int]]:
    """Run the attempt; with it, the pids of ranks that are still alive after it: none."""
    signals = StopSignals()
    signals.note()
    ending = run_attempt(plan, os.environ, signals, out=out or io.BytesIO())
    return ending, [pid for pid in read_pids(plan.attempt).values() if find_process(pid)]


@pytest.mark.parametrize("ranks", [("done",), ("done", "done", "done")])
def test_done(tmp_path: Path, ranks: tuple[str, ...]) -> None:
    plan, console = plan_of(tmp_path, *ranks), io.BytesIO()
    ending, left = run(plan, console)
    assert (ending, left) == (Ending(0), [])
    assert console.getvalue() == b"hello from rank 0\n"
    assert conclude(plan, ending, "").exit_code == 0


@pytest.mark.parametrize("ranks", [("train",), ("train", "train")])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_a_signal_stops_every_rank_once_and_cleanly(
    tmp_path: Path, ranks: tuple[str, ...], number: int, code: int
) -> None:
    plan = plan_of(tmp_path, *ranks)
    ending, left = run(plan, Console(plan, number))
    assert (ending.child_code, ending.killed, left) == (0, None, [])
    assert ending.signal == signal.Signals(number).name
    assert json.loads(plan.attempt.stop_request.read_text()) == {"signal": ending.signal}
    verdict = conclude(plan, ending, "go on")
    assert verdict.exit_code == code
    assert verdict.lines == [f"stopped by {ending.signal} at step 41; checkpoint step_00000041; go on with: go on"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what torchrun was sent is seen through /proc")
@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_torchrun_is_one_to_the_run(tmp_path: Path, number: signal.Signals, everyone: bool) -> None:
    """To it alone, or to it, to the ranks and to the launcher, as some schedulers do."""
    plan = plan_of(tmp_path, "train", "train")

    def pids() -> list[int]:
        agent = int((plan.attempt.path / "agent").read_text())
        return [agent, *read_pids(plan.attempt).values(), os.getpid()] if everyone else [agent]

    ending, left = run(plan, Console(plan, number, pids=pids))
    assert (ending.child_code, ending.killed, ending.signal, left) == (0, None, number.name, [])
    verdict = conclude(plan, ending, "go on")
    assert verdict.lines == [f"stopped by {number.name} at step 41; checkpoint step_00000041; go on with: go on"]


def test_a_signal_after_the_end_changes_nothing(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "done")
    raise_on_stop()
    verdict = attempts._run(plan, RunDir(tmp_path / "runs/demo"), Options(), StopSignals())
    assert attempts.finish(verdict) == 0
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)


def test_a_rank_that_starts_later_finds_the_request(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "train")
    signals = StopSignals()
    signals.name = "SIGTERM"
    assert run_attempt(plan, os.environ, signals, out=io.BytesIO()).child_code == 0


def test_ranks_that_do_not_stop_in_time_are_killed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "train", "deaf", grace_s=0.2)
    ending, left = run(plan, Console(plan, signal.SIGTERM))
    assert (ending.killed, left) == ("grace", [])
    assert conclude(plan, ending, "").exit_code == 75


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "deaf", "deaf")
    ending, left = run(plan, Console(plan, signal.SIGINT, signal.SIGINT))
    assert (ending.killed, left) == ("second Ctrl-C", [])
    assert conclude(plan, ending, "").exit_code == 130


@pytest.mark.parametrize(("what", "cause"), [("raise", "ValueError: boom-731"), ("kill", "ended without a word")])
def test_one_failed_rank_ends_the_others(tmp_path: Path, what: str, cause: str) -> None:
    plan = plan_of(tmp_path, "deaf", what)
    ending, left = run(plan)
    assert (ending.killed, left) == ("failure", [])
    assert [*ending.died] == ([1] if what == "kill" else [])
    assert all(0 <= time.time() - seen < 60 for seen in ending.died.values())
    verdict = conclude(plan, ending, "")
    assert verdict.exit_code == 1
    assert verdict.lines[0].startswith("FAILED: rank 1 of 2")
    assert cause in verdict.lines[0]


SENTENCES = {
    "hang": r"rank 1 of 2 hangs at step 7: in rank\.py:\d+ stuck \(waited \d+ s, launch\.hang_timeout_s\)",
    "halt": r"rank 1 was stopped \(SIGSTOP\) at step 7; the others waited \d+ s for it; continue .* with kill -CONT",
    "deaf": r"the ranks wait for each other: rank [01] at step 7 with its own gradients computed, rank [01] at .*",
}


@pytest.mark.parametrize("what", SENTENCES)
def test_ranks_that_do_not_get_on_are_ended_and_the_last_one_is_named(tmp_path: Path, what: str) -> None:
    plan, console = plan_of(tmp_path, "deaf", what, hang_timeout_s=0.5), io.BytesIO()
    ending, left = run(plan, console)
    assert (ending.killed, left, ending.died) == ("hang", [], {})
    assert ending.hang is not None
    assert (ending.hang.rank, ending.hang.step) == (None if what == "deaf" else 1, 7)
    verdict = conclude(plan, ending, "")
    assert verdict.exit_code == 1
    assert re.fullmatch(f"FAILED: {SENTENCES[what]}", verdict.lines[0])
    logs = [plan.attempt.rank_log(rank).read_text() for rank in (0, 1)]
    assert ["most recent call first" in log for log in logs] == [True, what != "halt"]
    assert console.getvalue() == b"hello from rank 0\n"  # the stacks stay in the log
    assert 0 <= time.time() - float(plan.attempt.ended.read_text()) < 60


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_never_starts_a_rank_is_ended(tmp_path: Path, ranks: int) -> None:
    plan = plan_of(tmp_path, *["deaf"] * ranks, hang_timeout_s=0.02)
    for name in ("rank.py", "agent.py"):
        (tmp_path / name).write_text("import time\nwhile True: time.sleep(1)")
    ending, left = run(plan)
    assert (ending.killed, left) == ("hang", [])
    log = "rank0.log" if ranks == 1 else "launcher.log"
    said = rf"FAILED: no rank has started \(waited \d+ s, 10 times launch.hang_timeout_s\); what .* in .*/{log}"
    assert re.fullmatch(said, conclude(plan, ending, "").lines[0])


def test_a_stop_that_was_asked_for_is_no_hang(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "deaf", "deaf", hang_timeout_s=1.0, grace_s=2.5)
    ending, _ = run(plan, Console(plan, signal.SIGTERM))
    assert (ending.killed, ending.hang) == ("grace", None)


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "deaf")
    script = textwrap.dedent(f"""
        import sys; sys.path[:0] = {sys.path!r}
        from launch.processes import dies_with_parent
        import subprocess
        subprocess.Popen({plan.argv!r}, preexec_fn=dies_with_parent(), start_new_session=True).wait()
    """)
    with subprocess.Popen([sys.executable, "-c", script]) as launcher:
        while not (pids := read_pids(plan.attempt)):
            time.sleep(0.01)
        rank = find_process(pids[0])
        assert rank is not None
        launcher.kill()
    deadline = time.monotonic() + 60
    while is_alive(rank) and time.monotonic() < deadline:
        time.sleep(0.01)
    gone = not is_alive(rank)
    kill_tree([rank])
    assert gone


def test_a_tree_is_killed_to_its_leaves(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "deaf", "deaf")
    with subprocess.Popen(plan.argv) as agent:
        while len(read_pids(plan.attempt)) < 2:
            time.sleep(0.01)
        root = find_process(agent.pid)
        assert root is not None
        kill_tree([root])
    assert not [pid for pid in read_pids(plan.attempt).values() if find_process(pid)]


def test_the_follower_copies_lines_once_and_clears_the_bar_on_a_terminal(tmp_path: Path) -> None:
    log, plain, terminal = tmp_path / "rank0.log", io.BytesIO(), io.BytesIO()
    followers = [LogFollower(log, plain, on_terminal=False), LogFollower(log, terminal, on_terminal=True)]
    for text in ("one\ntw", "o\n", "three"):
        with log.open("a") as file:
            file.write(text)
        for follower in followers:
            follower.poll()
    for follower in followers:
        follower.finish()
    assert plain.getvalue() == b"one\ntwo\nthree\n"
    assert terminal.getvalue() == b"\r\x1b[Kone\n\r\x1b[Ktwo\n\r\x1b[Kthree\n\r\x1b[K"
