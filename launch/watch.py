"""Whether the ranks get on, judged from their beats: one hangs, was stopped or is slow, or all wait for each other."""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.beat import BOUNDARY, EVALUATION, FINISHING, SAVING, STARTING, WAITING, Beat, is_step, read_beat
from configs.derive import counted
from configs.run_dir import AttemptDir
from launch.processes import Process, is_stopped
from launch.stacks import DUMP_S, Stack, ask_for_stacks, is_of_worker, own_frame, waits_for_others

LOOK_S = 0.25
LEAST_LIMIT_S, LIMIT_MEDIANS = 60.0, 20
PATIENCE = 10
"""Times the limit of a step: what is allowed to start-up, the first step, an evaluation, a checkpoint, the end."""
SLOW_S, SLOW_MEDIANS = 10.0, 10
NOTE_EVERY_S = 60.0
MAX_RANKS_TOLD = 8


@dataclass(frozen=True)
class Sight:
    """One rank at one look."""

    beat: Beat
    idle_s: float
    """Since its last beat."""
    step_s: float
    """Since its present step began; 0 outside a step."""
    is_stopped: bool = False
    """By SIGSTOP, or a Ctrl-Z."""


@dataclass(frozen=True)
class Hang:
    """Why an attempt was ended although no rank had failed."""

    rank: int | None
    """Which one did not arrive; None where the ranks wait for each other."""
    step: int
    sentence: str


def limit_s(beat: Beat, hang_timeout_s: float | None, *, all_started: bool = True) -> float:
    """Seconds without a beat after which a rank counts as hung."""
    step = hang_timeout_s or max(LEAST_LIMIT_S, LIMIT_MEDIANS * beat.median_s)
    return step if is_step(beat.phase) and beat.median_s and all_started else PATIENCE * step


def last_ranks(sights: Mapping[int, Sight]) -> list[int]:
    """Those with the least progress: the others wait for them, or will."""
    least = min((sight.beat.step, sight.beat.phase) for sight in sights.values())
    return [rank for rank, sight in sights.items() if (sight.beat.step, sight.beat.phase) == least]


def is_hung(sights: Mapping[int, Sight], hang_timeout_s: float | None, *, all_started: bool = True) -> bool:
    """Whether the last ranks do not get on any more. Others may have waited for longer: that is no hang.

    Without `all_started` the very last one was not seen yet."""
    last = [sights[rank] for rank in last_ranks(sights)] if sights else []
    limits = [limit_s(sight.beat, hang_timeout_s, all_started=all_started) for sight in last]
    return bool(last) and all(sight.idle_s > limit for sight, limit in zip(last, limits, strict=True))


def nothing_started(waited_s: float, hang_timeout_s: float | None, log: Path) -> Hang | None:
    """Where no rank has written a beat: what starts them hangs, whose own output is `log`."""
    limit = PATIENCE * (hang_timeout_s or LEAST_LIMIT_S)
    if waited_s <= limit:
        return None
    by = f"{PATIENCE} times launch.hang_timeout_s" if hang_timeout_s else "as long as a start may take"
    sentence = (
        f"no rank has started (waited {waited_s:.0f} s, {by}); what the process that starts them says is in {log}"
    )
    return Hang(None, 0, sentence)


def note_on_slow(sights: Mapping[int, Sight], pids: Mapping[int, int], world_size: int) -> str | None:
    """A line about the rank that the others have been waiting for much longer than usual."""
    for rank in last_ranks(sights) if sights else []:
        sight, beat = sights[rank], sights[rank].beat
        if beat.phase == WAITING or not beat.median_s or sight.step_s <= max(SLOW_S, SLOW_MEDIANS * beat.median_s):
            continue
        others = "; the others wait for it" if world_size > 1 else ""
        if sight.is_stopped:
            more = f"{others}; continue it with: kill -CONT {pids[rank]}"
            return f"note: rank {rank} was stopped (SIGSTOP) in its step {beat.step}{more}"
        taken = f"its step {beat.step} has taken {sight.step_s:.0f} s, the median is {beat.median_s:.2g} s"
        return f"note: rank {rank} is slow: {taken}{others}"
    return None


@dataclass(frozen=True)
class Scene:
    """What a hang is told from."""

    sights: Mapping[int, Sight]
    stacks: Mapping[int, Stack]
    """Of the ranks that answered."""
    world_size: int
    local_world_size: int
    cwd: Path


def explain(scene: Scene) -> Hang:
    """Who did not arrive, in one sentence."""
    order = sorted(scene.sights, key=lambda rank: (scene.sights[rank].beat.step, scene.sights[rank].beat.phase))
    stopped = [rank for rank in order if scene.sights[rank].is_stopped]
    if stopped:
        return _stopped(scene, stopped[0])
    astray = [rank for rank in order if scene.world_size == 1 or not _waits(scene, rank)]
    return _hangs(scene, astray[0]) if astray else _wait_for_each_other(scene, order)


def _stopped(scene: Scene, rank: int) -> Hang:
    sight = scene.sights[rank]
    others = f"the others waited {_seconds(sight)} for it" if scene.world_size > 1 else f"for {_seconds(sight)}"
    sentence = (
        f"rank {rank} was stopped (SIGSTOP) {_at(sight.beat)}; {others}; continue a stopped process with kill -CONT"
    )
    return Hang(rank, sight.beat.step, sentence)


def _hangs(scene: Scene, rank: int) -> Hang:
    sight = scene.sights[rank]
    sentence = (
        f"rank {rank} of {scene.world_size} hangs {_at(sight.beat)}: {_where(scene, rank)} ({_waited(scene, rank)})"
    )
    return Hang(rank, sight.beat.step, sentence)


def _wait_for_each_other(scene: Scene, order: list[int]) -> Hang:
    places = ", ".join(
        f"rank {rank} {_at(scene.sights[rank].beat)} {_where(scene, rank)}" for rank in order[:MAX_RANKS_TOLD]
    )
    absent = scene.local_world_size - len(order)
    if absent:
        what = f"{counted(absent, 'rank')} never arrived, and the others wait"
    elif scene.local_world_size < scene.world_size:
        what = "all ranks of this node wait for those of other nodes, whose own output says more"
    else:
        what = "the ranks wait for each other"
    sight = scene.sights[order[0]]
    return Hang(None, sight.beat.step, f"{what}: {places} ({_waited(scene, order[0])})")


def _waits(scene: Scene, rank: int) -> bool:
    return scene.sights[rank].beat.phase == WAITING or waits_for_others(scene.stacks.get(rank, []))


def _where(scene: Scene, rank: int) -> str:
    stack = scene.stacks.get(rank)
    if scene.sights[rank].beat.phase == WAITING:
        return "with its own gradients computed"
    if not stack:
        return "and does not say where"
    return f"in {own_frame(stack).shown(scene.cwd)}{' of a loader worker' if is_of_worker(stack) else ''}"


def _at(beat: Beat) -> str:
    if beat.phase == STARTING:
        return "in start-up"
    places = {BOUNDARY: "after", EVALUATION: "in the evaluation after", SAVING: "in saving after", FINISHING: "after"}
    end = ", the last" if beat.phase == FINISHING else ""
    return f"{places.get(beat.phase, 'at')} step {beat.step}{end}"


def _seconds(sight: Sight) -> str:
    return f"{sight.idle_s:.0f} s"


def _waited(scene: Scene, rank: int) -> str:
    sight = scene.sights[rank]
    is_patient = limit_s(sight.beat, 1.0, all_started=len(scene.sights) >= scene.local_world_size) > 1.0
    by = f"{PATIENCE} times launch.hang_timeout_s" if is_patient else "launch.hang_timeout_s"
    return f"waited {_seconds(sight)}, {by}"


class Watch:
    """Looks at the beats of this node's ranks. Its clock stands still while the launcher itself does: a machine that
    was asleep, or a container that was paused, had no rank that hangs."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self.clock_s, self._last_look = 0.0, time.monotonic()
        self._noted = float("-inf")
        self._beats: dict[int, Beat] = {}
        self._since: dict[int, tuple[float, float]] = {}
        """When the rank's beat was first seen, and when its step was."""

    def is_due(self) -> bool:
        return time.monotonic() - self._last_look >= LOOK_S

    def look(self, ranks: Mapping[int, Process]) -> dict[int, Sight]:
        """The ranks that are at work."""
        now = time.monotonic()
        self.clock_s += min(now - self._last_look, 4 * LOOK_S)
        self._last_look = now
        working = {rank: p for rank, p in ranks.items() if not self._attempt.outcome(rank).exists()}
        beats = {rank: beat for rank in working if (beat := read_beat(self._attempt.beat(rank)))}
        return {rank: self._sight(rank, beat, working[rank]) for rank, beat in beats.items()}

    def _sight(self, rank: int, beat: Beat, process: Process) -> Sight:
        before, (since, step_since) = self._beats.get(rank), self._since.get(rank, (self.clock_s, self.clock_s))
        if before != beat:
            since = self.clock_s
        if before is None or before.step != beat.step or not is_step(before.phase):
            step_since = self.clock_s
        self._beats[rank], self._since[rank] = beat, (since, step_since)
        step_s = self.clock_s - step_since if is_step(beat.phase) else 0.0
        return Sight(beat, self.clock_s - since, step_s, is_stopped(process))

    def may_note(self) -> bool:
        """Whether the last note is long enough ago; if so, it is now."""
        if self.clock_s - self._noted < NOTE_EVERY_S:
            return False
        self._noted = self.clock_s
        return True


def collect_stacks(
    attempt: AttemptDir, ranks: Mapping[int, Process], sights: Mapping[int, Sight], pipes: str | None
) -> dict[int, Stack]:
    """Have the ranks write down where they are, those that are not stopped; on GPUs NCCL's flight recorder too."""
    awake = {rank: process for rank, process in ranks.items() if rank in sights and not sights[rank].is_stopped}
    for rank in awake if pipes else ():
        # Nobody reads where NCCL has not started yet.
        with contextlib.suppress(OSError):
            pipe = os.open(f"{pipes}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"1\n")
            os.close(pipe)
    stacks = ask_for_stacks(attempt, awake)
    deadline = time.monotonic() + DUMP_S
    while (
        pipes
        and not all(attempt.nccl.with_name(f"{attempt.nccl.name}{rank}").exists() for rank in awake)
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    return stacks
