"""`verify topology`: the same run on any number of processes, in float64, where only rounding is left to differ."""

from collections.abc import Iterator, Sequence
from typing import Any

from configs.errors import EXIT_DONE
from launch.verify import compare
from launch.verify.runs import Ended, Place
from launch.verify.table import Row, Table

TOLERANCE = 1e-10
"""Of weights and losses, absolute and relative: sums are taken in another order. 1e-15 a step is usual."""


def verify_bits(place: Place, nprocs: Sequence[int]) -> int:
    """Returns the exit code; `place` has virtual shards. Every bit must be that of the first of `nprocs`."""
    first = place.reference(nprocs[0])
    table = Table("processes")
    for nproc in nprocs[1:]:
        other = place.train(f"on-{nproc}", nproc=nproc)
        problems = other.unlike(EXIT_DONE) or compare.bits(first, other)
        happened = "another run" if problems else f"0 differing bits in {compare.describe(first)}"
        table.add(Row(f"{nproc} against {nprocs[0]}", "every bit", happened, problems))
    return table.conclude()


def verify_topology(place: Place, nprocs: Sequence[int]) -> int:
    """Returns the exit code; `place` has the settings of float64. The first of `nprocs` is what the others must be."""
    first = place.reference(nprocs[0])
    table = Table("processes")
    for nproc in nprocs[1:]:
        other = place.train(f"on-{nproc}", nproc=nproc)
        problems = other.unlike(EXIT_DONE) or [*differences(first, other)]
        if problems and other.code == EXIT_DONE:
            problems += [f"by its nature: {layer}" for layer in first.state().get("rank_bound_layers", [])]
        happened = "another run" if problems else f"the same samples; weights within {worst(first, other):.0e}"
        table.add(Row(f"{nproc} against {nprocs[0]}", f"the same samples, within {TOLERANCE:g}", happened, problems))
    return table.conclude()


def differences(one: Ended, other: Ended) -> Iterator[str]:
    yield from compare.samples(one, other)
    for name, distance in compare.distances(one, other).items():
        if not distance <= TOLERANCE:
            yield f"{name} differs by {distance:.1e}"
            break
    yield from _metrics(one.metrics(), other.metrics())


def worst(one: Ended, other: Ended) -> float:
    return max(compare.distances(one, other).values(), default=0.0)


def _metrics(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> Iterator[str]:
    if [sorted(point) for point in left] != [sorted(point) for point in right]:
        yield "metrics.jsonl has other points"
        return
    for first, second in zip(left, right, strict=True):
        for key, value in first.items():
            # Counts are integers; their ratios are equal to the last digit.
            exact = key.endswith(("top1", "top5", "step"))
            if value != second[key] and (exact or abs(value - second[key]) > TOLERANCE * max(1.0, abs(value))):
                yield f"metrics.jsonl: {key} at step {first['step']} is {value} and {second[key]}"
                return
