"""Ratios of now against those kept in expected.json: has anything got slower? Pure, but for reading the file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.harness import Row

EXPECTED = Path(__file__).resolve().parent / "expected.json"


@dataclass(frozen=True)
class Expectation:
    """What a row's ratio was, which direction is better, and which share of it may be lost."""

    ratio: float
    better: Literal["higher", "lower"]
    tolerance: float

    @property
    def limit(self) -> float:
        """The worst ratio that is tolerated."""
        return self.ratio * (1 - self.tolerance if self.better == "higher" else 1 + self.tolerance)

    def is_met_by(self, ratio: float) -> bool:
        return ratio >= self.limit if self.better == "higher" else ratio <= self.limit


@dataclass(frozen=True)
class Expected:
    """The whole file: which comparisons to run, in so many rounds (None: the usual number), and what of their rows."""

    comparisons: Mapping[str, int | None]
    rows: Mapping[str, Expectation]
    met: Sequence[str] = ()
    """Rows whose target must be met: accuracies, pixels."""

    def only(self, names: Sequence[str]) -> "Expected":
        """Of these comparisons alone."""
        rounds = {name: self.comparisons.get(name) for name in names}
        rows = {key: row for key, row in self.rows.items() if key.partition("/")[0] in rounds}
        return Expected(rounds, rows, [key for key in self.met if key.partition("/")[0] in rounds])

    def unkept(self) -> list[str]:
        """Comparisons that nothing is kept of, so that they could not fail."""
        kept = {key.partition("/")[0] for key in self.rows}
        return [name for name in self.comparisons if name not in kept]


def load_expected(path: Path = EXPECTED) -> Expected:
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = {key: Expectation(**row) for key, row in content["rows"].items()}
    return Expected(content["comparisons"], rows, content["met"])


def regressions(rows: Sequence[Row], expected: Expected) -> list[str]:
    """A sentence for each expected row that is worse than tolerated, or that nobody measured."""
    found = {row.key: row for row in rows}
    sentences = [sentence_on(key, found.get(key), row) for key, row in expected.rows.items()]
    sentences += [unmet_sentence(key, found.get(key)) for key in expected.met]
    return [sentence for sentence in sentences if sentence]


def unmet_sentence(key: str, row: Row | None) -> str:
    """Empty where the target is met."""
    if row is None or row.value is None:
        return sentence_on(key, row, Expectation(0.0, "higher", 0.0))
    return "" if row.is_met else f"{key} is {row.result}, and the target is {row.target}."


def sentence_on(key: str, row: Row | None, expected: Expectation) -> str:
    """Empty where all is well."""
    if row is None:
        return f"{key} is expected, and no comparison that was run has it."
    if row.value is None:
        return f"{key} is {row.result}."
    if expected.is_met_by(row.value):
        return ""
    side = "below" if expected.better == "higher" else "above"
    return (
        f"{key} has the ratio {row.value:.3g}, {side} {expected.limit:.3g}: expected is {expected.ratio:g}, "
        f"and {expected.tolerance:.0%} worse is tolerated."
    )
