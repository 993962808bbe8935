"""`python -m benchmarks [WHAT ...]`: run the comparisons, print one table, write it to benchmarks/out/ as JSON and as a
picture.

A target that is missed is said in the table and is no failure: exit 0 means that everything was measured. With --check,
exit 1 means that something is worse than benchmarks/expected.json tolerates.
"""

import argparse
import compileall
import importlib
import sys
import traceback
from collections.abc import Mapping

from benchmarks.check import load_expected, regressions
from benchmarks.harness import ROOT, Row, describe_machine, header, not_measured, remarks, save, table
from benchmarks.picture import draw

# Each is a module here with `measure(rounds: int | None) -> list[Row]`; None = its own number of rounds.
DEFAULT = (
    *("tutorial", "parts", "unrolled", "ddp", "startup", "ranks", "exit", "cli", "checkpoint", "shards", "accuracy"),
    *("frameworks", "metrics", "photographs", "mnist"),
)
ALL = (*DEFAULT, "gpu")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare Lockstep's speed, side by side.")
    parser.add_argument("what", nargs="*", help=f"any of {', '.join(ALL)}; default: {' '.join(DEFAULT)}")
    parser.add_argument("--rounds", type=int, help="how often each variant is measured, instead of the usual number")
    parser.add_argument("--check", action="store_true", help="compare with the ratios kept in benchmarks/expected.json")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.what if name not in ALL]
    if unknown or (args.rounds is not None and args.rounds < 1):
        wrong = f"there is no comparison {unknown[0]!r}; there are {', '.join(ALL)}" if unknown else "--rounds is >= 1"
        print(f"benchmarks: {wrong}", file=sys.stderr)
        return 2
    names = list(dict.fromkeys(args.what))
    if args.check:
        return check(names, args.rounds)
    run(dict.fromkeys(names or DEFAULT, args.rounds), "-".join(names) or "all")
    return 0


def check(names: list[str], rounds: int | None) -> int:
    """Run what expected.json names, or `names` of it; tell what has got worse."""
    expected = load_expected()
    expected = expected.only(names or list(expected.comparisons))
    if unkept := expected.unkept():
        print(f"benchmarks: benchmarks/expected.json keeps no ratio of {', '.join(unkept)}", file=sys.stderr)
        return 2
    rows = run({name: rounds or usual for name, usual in expected.comparisons.items()}, "check")
    sentences = regressions(rows, expected)
    print("\n" + "\n".join(sentences or [f"{len(expected.rows)} ratios are as expected."]))
    return 1 if sentences else 0


def run(comparisons: Mapping[str, int | None], title: str) -> list[Row]:
    """Measure, each in so many rounds; print the table; write benchmarks/out/TITLE.json and .svg."""
    for package in ("configs", "launch", "trainer"):  # as a second start finds them, also with PYTHONDONTWRITEBYTECODE
        compileall.compile_dir(ROOT / package, quiet=2)
    machine = describe_machine()
    print(header(machine), flush=True)
    rows: list[Row] = []
    path = ROOT / "benchmarks" / "out" / f"{title}.json"
    for name, rounds in comparisons.items():
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        rows += measured(name, rounds)
        save(path, machine, rows)
    print("\n".join(["", table(rows), "", *remarks(rows)]))
    picture = path.with_suffix(".svg")
    picture.write_text(draw(rows, f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}"), encoding="utf-8")
    print(f"all values: {path.relative_to(ROOT)}, as a picture: {picture.relative_to(ROOT)}")
    return rows


def measured(name: str, rounds: int | None) -> list[Row]:
    """One comparison's rows. One that fails leaves the others theirs: it is a row with the reason, and a traceback."""
    try:
        rows: list[Row] = importlib.import_module(f"benchmarks.{name}").measure(rounds)
    except Exception as error:
        traceback.print_exc()
        return [not_measured(name, f"{type(error).__name__}: {error}".splitlines()[0])]
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
