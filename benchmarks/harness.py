"""Measure in turn, compare pair by pair, say how far the figures spread. Knows no workload and no torch."""

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("torch", "torchvision", "accelerate", "tensorboard")
# Share of the cores that is busy before we start, from which on the figures are not to be trusted.
BUSY = 0.25
# Distance of a ratio's quartiles, as a share of its median, from which on we say so.
WIDE = 0.15


@dataclass(frozen=True)
class Spread:
    """Median of some values, and the quartiles around it."""

    median: float
    low: float
    high: float
    count: int

    def show(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)}-{_short(self.high)})"


@dataclass(frozen=True)
class Target:
    """What a ratio must reach."""

    sense: Literal[">=", "<="]
    value: float

    def is_met_by(self, ratio: float) -> bool:
        return ratio >= self.value if self.sense == ">=" else ratio <= self.value

    def show(self) -> str:
        return f"{self.sense} {self.value:.3g}"


@dataclass(frozen=True)
class Row:
    """One comparison. `key` names it for good: workload/what."""

    key: str
    subject: str
    versus: str
    result: str
    """The figure that counts, as the table shows it."""
    value: float | None = None
    target: str = ""
    is_met: bool | None = None
    """None where there is no target, or where nothing was measured."""
    pairs: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    """For the JSON file: all that was measured."""


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles; of a single value, that value."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(statistics.median(values), quartiles[0], quartiles[2], len(values))


def in_turn(variants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Measure each variant once a round, A B A B: value i of each was measured right after those of the others."""
    measured: dict[str, list[T]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, measure in variants.items():
            measured[name].append(measure())
    return measured


def ratio_row(
    key: str,
    measured: Mapping[str, Sequence[float]],
    subject: str,
    versus: str,
    unit: str,
    target: Target | None = None,
    limit: Target | None = None,
) -> Row:
    """The median of the ratios subject/versus of each pair, beside both medians.
    `target` is for the ratio; `limit`, instead of it, for the subject's own median in `unit`."""
    ours = spread(measured[subject])
    ratio = spread([ours / theirs for ours, theirs in zip(measured[subject], measured[versus], strict=True)])
    goal, reached = (limit, ours.median) if limit else (target, ratio.median)
    return Row(
        key=key,
        subject=f"{subject}: {ours.show()} {unit}",
        versus=f"{versus}: {spread(measured[versus]).show()} {unit}",
        result=ratio.show(),
        value=ratio.median,
        target=f"{goal.show()} {unit if limit else ''}".strip() if goal else "",
        is_met=goal.is_met_by(reached) if goal else None,
        pairs=ratio.count,
        details={
            "unit": unit, "ratio": asdict(ratio), "target": target.value if target else None,
            subject: list(measured[subject]), versus: list(measured[versus]),
        },
    )  # fmt: skip


def not_measured(key: str, reason: str) -> Row:
    """A row for what cannot be measured here."""
    return Row(key, "", "", f"not measured: {reason}")


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    header = ["what", "measured", "against", "ratio", "pairs", "target", "met"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        met = {True: "yes", False: "**no**", None: ""}[row.is_met]
        lines.append([row.key, row.subject, row.versus, row.result, str(row.pairs or ""), row.target, met])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def describe_machine() -> dict[str, Any]:
    """What the figures depend on, as it is now."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "busy_cores": busy_cores(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONS},
    }


def busy_cores(seconds: float = 2.0) -> float:
    """How many cores others keep busy while this process waits. Not the load average, which still counts what made the
    environment a minute ago; macOS has no other."""
    before = _ticks()
    if before is None:
        return os.getloadavg()[0]
    time.sleep(seconds)
    after = _ticks() or before
    idle, total = (new - old for new, old in zip(after[:2], before[:2], strict=True))
    return after[2] * (1 - idle / max(1, total))


def _ticks() -> tuple[int, int, int] | None:
    """(idle, all) since the start of the machine, and the number of its cores; None where the kernel does not tell."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    numbers = [int(number) for number in lines[0].split()[1:9]]
    return numbers[3] + numbers[4], sum(numbers), sum(line.startswith("cpu") for line in lines) - 1


def header(machine: Mapping[str, Any]) -> str:
    """The machine in a few lines, with a warning where it is busy with something else."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    busy = f"{machine['busy_cores']:.2f} of them busy before the start"
    lines = [f"{machine['date']}; {machine['cpu']}, {machine['cores']} cores, {busy}"]
    lines += [f"Python {machine['python']}, {versions}; medians (and quartiles), ratios pair by pair"]
    if machine["busy_cores"] > BUSY * machine["cores"]:
        lines.append("WARNING: the machine is busy with something else; trust no figure below, ratios least badly")
    return "\n".join(lines)


def remarks(rows: Sequence[Row]) -> list[str]:
    """What to know of the figures, after the fact: which of them spread widely, and whether the machine alone does."""
    ratios = {row.key: Spread(**row.details["ratio"]) for row in rows if "ratio" in row.details}
    lines = []
    if single := [key for key, ratio in ratios.items() if ratio.count == 1]:
        lines.append(f"WARNING: one pair each, so nothing is known of the spread: {', '.join(single)}")
    wide = {key: ratio for key, ratio in ratios.items() if ratio.high - ratio.low > WIDE * ratio.median}
    for key, ratio in wide.items():
        what = "a loop against itself: the machine alone" if key.endswith("/noise") else "take more rounds"
        lines.append(f"WARNING: {key} spreads by more than {WIDE:.0%} of its median, {ratio.show()}; {what}")
    return lines


def save(path: Path, machine: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Everything measured, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def run_python(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    expected: int = 0,
) -> str:
    """Run this Python, or another, in the project's folder; returns what it printed, its errors last.
    Raises with the end of that unless it ends with `expected`."""
    done = subprocess.run(
        [python, *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    if done.returncode != expected:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{output[-3000:]}")
    return output


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
