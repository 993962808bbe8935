"""A proof's table: what was done, what was expected, what happened."""

from collections.abc import Sequence
from dataclasses import dataclass

from configs.errors import EXIT_DONE, EXIT_TRAINING
from launch.follow import say


@dataclass(frozen=True)
class Row:
    """`problems` are empty where what happened is what was expected."""

    what: str
    expected: str
    happened: str
    problems: Sequence[str] = ()


class Table:
    """Collects the rows, each told as it comes, and ends in the whole table."""

    def __init__(self, first_column: str) -> None:
        self._first_column = first_column
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        say(f"{'FAILED' if row.problems else 'ok'}: {row.what}: {row.happened}")
        for problem in row.problems:
            say(f"  {problem}")

    def conclude(self) -> int:
        """Print the table; returns the exit code: 0 only if all held."""
        say("")
        head = (self._first_column, "expected", "happened", "holds")
        cells = [(row.what, row.expected, row.happened, "no" if row.problems else "yes") for row in self.rows]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        for line in (head, tuple("-" * width for width in widths), *cells):
            say("| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) + " |")
        failed = sum(bool(row.problems) for row in self.rows)
        say(f"{len(self.rows) - failed} of {len(self.rows)} hold")
        return EXIT_TRAINING if failed else EXIT_DONE
