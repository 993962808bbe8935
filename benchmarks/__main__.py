"""`python -m benchmarks [WHAT ...]`: run the comparisons, print one table, write it as JSON to benchmarks/out/.

A target that is missed is said in the table and is no failure: exit 0 means that everything was measured.
"""

import argparse
import importlib
import sys

from benchmarks.harness import ROOT, Row, describe_machine, header, save, table

# Each is a module here with `measure(rounds: int | None) -> list[Row]`; None = its own number of rounds.
DEFAULT = ("tutorial", "ddp", "startup", "checkpoint", "shards", "accuracy")
ALL = (*DEFAULT, "gpu")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare Lockstep's speed, side by side.")
    parser.add_argument("what", nargs="*", help=f"any of {', '.join(ALL)}; default: {' '.join(DEFAULT)}")
    parser.add_argument("--rounds", type=int, help="how often each variant is measured, instead of the usual number")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.what if name not in ALL]
    if unknown or (args.rounds is not None and args.rounds < 1):
        wrong = f"there is no comparison {unknown[0]!r}; there are {', '.join(ALL)}" if unknown else "--rounds is >= 1"
        print(f"benchmarks: {wrong}", file=sys.stderr)
        return 2
    names = list(dict.fromkeys(args.what)) or list(DEFAULT)
    machine = describe_machine()
    print(header(machine), flush=True)
    rows: list[Row] = []
    for name in names:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        rows += importlib.import_module(f"benchmarks.{name}").measure(args.rounds)
    print(f"\n{table(rows)}")
    path = ROOT / "benchmarks" / "out" / f"{'-'.join(names) if args.what else 'all'}.json"
    save(path, machine, rows)
    print(f"\nall values: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
