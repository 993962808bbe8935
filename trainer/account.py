"""Where this rank's time goes: one look at the clock at each change of phase, which is also its beat. No torch."""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from configs.beat import (
    BOUNDARY,
    COMPUTE,
    DATA,
    EVALUATION,
    FINISHING,
    LAYOUT,
    SAVING,
    STARTING,
    UPDATE,
    WAITING,
    Beat,
    open_beat,
    read_beat,
)
from configs.run_dir import AttemptDir, RunDir

KINDS = {
    "startup": (STARTING,),
    "data": (DATA,),
    "compute": (COMPUTE, UPDATE),
    "waiting": (WAITING,),
    "evaluation": (EVALUATION,),
    "checkpoints": (SAVING,),
    "other": (BOUNDARY, FINISHING),
}
_RECENT = 32
"""Steps that the median is taken of."""


class Account:
    """The seconds of each phase of this attempt."""

    def __init__(self, attempt: AttemptDir | None = None, rank: int = 0) -> None:
        """Starting since the launcher wrote the attempt's plan. Without an attempt nobody is shown anything."""
        self._page = bytearray(LAYOUT.size) if attempt is None else open_beat(attempt.beat(rank))
        self._since = time.monotonic()
        self._epoch = time.time() - self._since
        now = self._since + self._epoch
        self.started = now if attempt is None else min(now, _written(attempt.plan, now))
        self.seconds = [0.0] * (FINISHING + 1)
        self.seconds[STARTING] = now - self.started
        self.phase, self.step, self.first_step, self.median_s = STARTING, 0, -1, 0.0
        self._step_began = self._since
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._num_steps = 0
        self.enter(STARTING)

    def enter(self, phase: int) -> None:
        """From now on in `phase`; in the same one as before it is a sign of life."""
        now = time.monotonic()
        self.seconds[self.phase] += now - self._since
        self.phase, self._since = phase, now
        LAYOUT.pack_into(
            self._page, 0, phase, self.step, now + self._epoch, self.median_s, self.first_step, self.started
        )

    def beat(self) -> None:
        """A sign of life."""
        self.enter(self.phase)

    def start_at(self, step: int) -> None:
        """Training begins, after `step` completed updates."""
        self.step = self.first_step = step
        self.beat()

    def begin_step(self) -> None:
        self.enter(DATA)
        self._step_began = self._since

    def end_step(self, step: int) -> None:
        """`step` updates are completed."""
        self.step = step
        self.enter(BOUNDARY)
        self._recent.append(self._since - self._step_began)
        self._num_steps += 1
        # At 1, 2, 4, 8, 16 steps and then every 32.
        if self._num_steps % _RECENT == 0 or (
            self._num_steps < _RECENT and not self._num_steps & (self._num_steps - 1)
        ):
            self.median_s = sorted(self._recent)[len(self._recent) // 2]

    def busy_s(self) -> float:
        """Seconds in steps so far."""
        return sum(self.seconds[DATA:FINISHING])

    def by_kind(self) -> dict[str, float]:
        """Seconds of this attempt so far; together they are all of it."""
        self.beat()
        return {kind: sum(self.seconds[phase] for phase in phases) for kind, phases in KINDS.items()}


def _written(path: Path, otherwise: float) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return otherwise


def that_counts(before: Mapping[str, float], own: Mapping[str, float]) -> dict[str, float]:
    """Seconds by kind of all that counts: what the checkpoint brought and this attempt's own.

    Start-up is that of the run's first attempt; later ones are time that restarts cost.
    """
    total = {kind: before.get(kind, 0.0) + own[kind] for kind in KINDS}
    return total | {"startup": before.get("startup", own["startup"])}


class Earlier(NamedTuple):
    """What became of the attempts before this one."""

    wall_s: float
    replayed_steps: int


def earlier_attempts(run: RunDir, current: AttemptDir, first_step: int) -> Earlier:
    """Look through the run folder; `first_step` is where the current attempt went on from."""
    found = []
    for path in (run.path / "attempts").glob("[0-9]*/beat-rank0"):
        beat = None if path.parent == current.path else read_beat(path)
        if beat is not None:
            found.append((beat, max(beat.time, _ended(AttemptDir(path.parent)))))
    found.sort(key=lambda pair: pair[0].started)
    wall_s = sum(max(0.0, ended - beat.started) for beat, ended in found)
    return Earlier(wall_s, replayed_steps([beat for beat, _ in found], first_step))


def _ended(attempt: AttemptDir) -> float:
    """When the launcher saw the end of it; 0 if it never did."""
    with contextlib.suppress(OSError, ValueError):
        return float(attempt.ended.read_text(encoding="ascii"))
    return 0.0


def replayed_steps(beats: Iterable[Beat], first_step: int) -> int:
    """Updates that were made again, because an attempt went on from before where the one before it had come to."""
    trained = [(beat.first_step, beat.step) for beat in beats if beat.first_step >= 0]
    begins = [first for first, _ in trained[1:]] + [first_step]
    return sum(max(0, last - begin) for (_, last), begin in zip(trained, begins, strict=False))


class TimeOfRun(NamedTuple):
    """The account of a whole run: `seconds` by kind, restarts included, is all of its time."""

    seconds: dict[str, float]
    replayed_steps: int

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time in which steps that count were computed."""
        return self.seconds["compute"] / self.total_s if self.total_s else 0.0

    def describe(self) -> str:
        names = {"startup": "start-up", "waiting": "waiting for others"}
        parts = [f"{names.get(kind, kind)} {value:.1f} s" for kind, value in self.seconds.items()]
        return "  ".join([*parts, f"replayed steps {self.replayed_steps}", f"goodput {100 * self.goodput:.0f} %"])

    def metrics(self) -> dict[str, float]:
        return {f"perf/time_{kind}_s": value for kind, value in self.seconds.items()} | {"perf/goodput": self.goodput}

    def facts(self) -> dict[str, float]:
        """For result.json."""
        seconds = {f"{kind}_s": value for kind, value in self.seconds.items()}
        return seconds | {"total_s": self.total_s, "replayed_steps": self.replayed_steps, "goodput": self.goodput}


def time_of_run(before: Mapping[str, float], own: Mapping[str, float], earlier: Earlier) -> TimeOfRun:
    """What `that_counts` does not name of the wall time of all attempts went into restarts."""
    seconds = that_counts(before, own)
    wall_s = earlier.wall_s + sum(own.values())
    return TimeOfRun(seconds | {"restarts": max(0.0, wall_s - sum(seconds.values()))}, earlier.replayed_steps)


NOTABLE, NOTABLE_S = 0.1, 1.0
"""Ranks differ notably if one spent this much more of its steps' time, and these seconds more, on its own work."""
MAX_LINES = 8


def straggler_lines(ranks: list[dict[str, float]], *, on_gpu: bool = False) -> list[str]:
    """What to say of the ranks' shares of the time in data, compute and waiting for others: the slowest first.

    On a GPU the host does not know when the device waits: there only the data tell who lagged.
    """
    work = ("data",) if on_gpu else ("data", "compute")
    shares = [_shares(seconds) for seconds in ranks]
    own = [sum(share[kind] for kind in work) for share in shares]
    own_s = [sum(seconds[kind] for kind in work) for seconds in ranks]
    if max(own) - min(own) < NOTABLE or max(own_s) - min(own_s) < NOTABLE_S:
        on = "data; waiting for others is within compute on a GPU" if on_gpu else "its own work"
        return [f"no rank lagged: each spent {_percents(min(own), max(own))} of its steps on {on}"]
    order = sorted(range(len(ranks)), key=lambda rank: -own[rank])
    lines = [f"rank {rank}: {_describe(shares[rank], on_gpu=on_gpu)}" for rank in order[:MAX_LINES]]
    lines[0] += "  (slowest)"
    return lines


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    kinds = ("data", "compute", "waiting")
    total = sum(seconds[kind] for kind in kinds) or 1.0
    return {kind: seconds[kind] / total for kind in kinds}


def _describe(share: Mapping[str, float], *, on_gpu: bool) -> str:
    data, compute, waiting = (f"{100 * share[kind]:.0f} %" for kind in ("data", "compute", "waiting"))
    if on_gpu:
        return f"data {data}  compute and waiting for others {compute}"
    return f"data {data}  compute {compute}  waiting for others {waiting}"


def _percents(low: float, high: float) -> str:
    first, last = f"{100 * low:.0f}", f"{100 * high:.0f}"
    return f"{first} %" if first == last else f"{first} to {last} %"
