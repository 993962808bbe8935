"""Start the ranks, watch them, pass a stop on to each of them once, and leave nothing running."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from configs.contract import Outcome, write_atomically
from configs.run_dir import AttemptDir
from launch.follow import LogFollower, shown
from launch.plan import LaunchPlan
from launch.processes import Process, dies_with_parent, find_process, is_alive, kill_tree, pending_signals, send
from launch.rank_environment import NCCL_PIPES
from launch.signals import StopSignals, blocked_for_children
from launch.watch import Hang, Scene, Sight, Watch, collect_stacks, explain, is_hung, note_on_slow, nothing_started

POLL_S = 0.05
AFTER_FAILURE_S = 5.0
"""What the other ranks get to end by themselves once one has failed."""

Killed = Literal["grace", "second Ctrl-C", "nothing to save", "failure", "hang"]


@dataclass(frozen=True)
class Ending:
    """How an attempt ended, as far as the launcher itself could see; the rest is in the outcome files."""

    child_code: int
    """Exit code of the rank (one process) or of torchrun; negative for a signal."""
    signal: str | None = None
    killed: Killed | None = None
    """Why the launcher had to kill."""
    died: Mapping[int, float] = field(default_factory=dict)
    """Ranks that were dead without an outcome before the launcher killed anything; when that was seen, by the clock."""
    hang: Hang | None = None
    """Why the launcher killed though nothing had failed."""


def run_attempt(
    plan: LaunchPlan, environ: Mapping[str, str], signals: StopSignals, *, out: BinaryIO | None = None
) -> Ending:
    """Start the plan's command and stay until nothing of it is left. Main thread only: they die with it."""
    attempt = plan.attempt
    out = sys.stdout.buffer if out is None else out
    follower = LogFollower(attempt.rank_log(0), out, on_terminal=plan.worker.terminal is not None)
    child = _start(plan, environ)
    watch = _Watch(plan, child, signals, follower)
    try:
        return watch.until_the_end()
    finally:
        watch.kill()
        child.wait()
        follower.finish()
        with contextlib.suppress(OSError):  # a full disk: the ranks' last beats have to do
            write_atomically(attempt.ended, f"{time.time():.3f}")


def _start(plan: LaunchPlan, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # A session of its own: a Ctrl-C in the terminal reaches the launcher only, and counts once.
    with _log_of(plan).open("ab") as output, blocked_for_children():
        return subprocess.Popen(
            plan.argv,
            cwd=plan.cwd,
            env=plan.child_environ(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )


def _log_of(plan: LaunchPlan) -> Path:
    """Where what is started writes: the rank itself, or what starts the ranks."""
    return plan.attempt.rank_log(0) if plan.worker.launcher == "direct" else plan.attempt.agent_log


class _Watch:
    """The state of one attempt while it runs."""

    def __init__(
        self, plan: LaunchPlan, child: subprocess.Popen[bytes], signals: StopSignals, follower: LogFollower
    ) -> None:
        self._plan, self._attempt = plan, plan.attempt
        self._child, self._signals, self._follower = child, signals, follower
        self._grace_s = plan.config.launch.grace_s
        self._saves = plan.worker.mode == "train"
        self._root = find_process(child.pid)
        self._ranks: dict[int, Process | None] = {}
        self._asked = False
        self._told: set[int] = set()
        self._died: dict[int, float] = {}
        self._kill_at = float("inf")
        self._reason: Killed | None = None
        self._killed: Killed | None = None
        self._watch = Watch(plan.attempt)
        self._hang: Hang | None = None

    def until_the_end(self) -> Ending:
        while True:
            code = self._child.poll()  # first, so that whatever an ended child wrote is seen below
            self._find_ranks()
            self._notice_failures()
            self._follower.poll()
            if code is not None:
                return Ending(code, self._signals.name, self._killed, self._died, self._hang)
            self._pass_on_stop()
            # Where the end has a date already, nothing hangs for long.
            if self._kill_at == float("inf") and self._watch.is_due():
                self._notice_hang({rank: process for rank, process in self._ranks.items() if process})
            if time.monotonic() >= self._kill_at and self._killed is None:
                self._killed = self._reason
                self.kill()
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL the whole tree: torchrun's ranks are in sessions of their own, so no process group holds it."""
        kill_tree(process for process in (self._root, *self._ranks.values()) if process)

    def _find_ranks(self) -> None:
        for rank, pid in read_pids(self._attempt).items():
            if rank not in self._ranks:
                self._ranks[rank] = find_process(pid)

    def _notice_failures(self) -> None:
        for rank, process in self._ranks.items():
            # Life first, outcome second: a rank writes its outcome before it ends.
            alive = process is not None and is_alive(process)
            outcome = load_outcome(self._attempt, rank)
            if outcome is None and not alive and rank not in self._died and self._killed is None:
                self._died[rank] = time.time()
            if (outcome is None and not alive) or (outcome is not None and outcome.status == "failed"):
                self._kill_after(AFTER_FAILURE_S, "failure")

    def _pass_on_stop(self) -> None:
        if self._root:
            self._signals.hear(pending_signals(self._root))  # torchrun was signalled: it keeps them, for us to see
        name = self._signals.name
        if name is None:
            return
        if not self._asked:
            self._asked = True
            with contextlib.suppress(OSError):  # a full disk; the signals reach all ranks but those still starting
                write_atomically(self._attempt.stop_request, json.dumps({"signal": name}))
            if self._saves:
                self._kill_after(self._grace_s, "grace")
            else:
                self._kill_after(0.0, "nothing to save")
        if self._signals.force:
            self._kill_after(0.0, "second Ctrl-C")
        # Not to torchrun, which would not hear it: the ranks end, then it does, with 0.
        for rank, process in self._ranks.items():
            if process and rank not in self._told:
                send(process, signal.SIGINT if name == "SIGINT" else signal.SIGTERM)
                self._told.add(rank)

    def _notice_hang(self, ranks: Mapping[int, Process]) -> None:
        sights = self._watch.look(ranks)
        if not self._ranks and self._plan.nnodes == 1:  # of several nodes one may wait for the others to come up
            log = shown(_log_of(self._plan), self._plan.cwd)
            self._hang = nothing_started(self._watch.clock_s, self._plan.config.launch.hang_timeout_s, log)
            if self._hang is not None:
                self._kill_after(0.0, "hang")
            return
        all_started = len(ranks) == self._plan.worker.local_world_size
        if is_hung(sights, self._plan.config.launch.hang_timeout_s, all_started=all_started):
            self._hang = self._explain_hang(ranks, sights)
            self._kill_after(0.0, "hang")
            return
        pids = {rank: process.pid for rank, process in ranks.items()}
        note = note_on_slow(sights, pids, self._plan.worker.world_size)
        if note and self._watch.may_note():
            self._follower.say(note)

    def _explain_hang(self, ranks: Mapping[int, Process], sights: Mapping[int, Sight]) -> Hang:
        plan = self._plan
        self._follower.leave()  # rank 0's log is the screen, and the stacks are long
        pipes = plan.environment.get(NCCL_PIPES)
        stacks = collect_stacks(plan.attempt, ranks, sights, pipes)
        return explain(Scene(sights, stacks, plan.worker.world_size, plan.worker.local_world_size, plan.cwd))

    def _kill_after(self, seconds: float, reason: Killed) -> None:
        at = time.monotonic() + seconds
        if at < self._kill_at:
            self._kill_at, self._reason = at, reason


def read_pids(attempt: AttemptDir) -> dict[int, int]:
    """Rank -> pid, of the ranks that have started on this node."""
    pids = {}
    for path in attempt.path.glob("pid-rank*"):
        with contextlib.suppress(ValueError, OSError):  # one that is just being written is read the next time
            pids[int(path.name.removeprefix("pid-rank"))] = int(path.read_text(encoding="utf-8"))
    return dict(sorted(pids.items()))


def load_outcome(attempt: AttemptDir, rank: int) -> Outcome | None:
    path = attempt.outcome(rank)
    return Outcome.load(path) if path.exists() else None
