"""`verify resume`: a run that is killed again and again ends with the bits of one that was not."""

import itertools
import random
from collections.abc import Sequence

from configs.errors import EXIT_DONE, EXIT_TRAINING, TrainingError
from launch.verify import compare
from launch.verify.runs import Place
from launch.verify.table import Row, Table

Kill = tuple[str, int, int]
"""(kind of fault, rank, step)"""


def verify_resume(place: Place, nprocs: Sequence[int], kills: int, seed: int) -> int:
    """Returns the exit code. Several `nprocs` are taken in turn, from one start to the next.

    Raises TrainingError if the run does not work without being killed.
    """
    whole = place.reference(nprocs[0])
    steps = int(whole.state()["train_state"]["step"])
    chance = random.Random(seed)  # noqa: S311  # where to kill is no secret
    planned = draw_kills(chance, steps, list(itertools.islice(itertools.cycle(nprocs), kills)))
    turns = itertools.cycle(nprocs)
    settings = [as_setting(planned), *place.frequent_checkpoints(steps)]
    table = Table("kill")
    for kind, rank, step in planned:
        nproc = next(turns)
        cut = place.train("cut", *settings, nproc=nproc)
        happened = f"exit {cut.code}, newest checkpoint {'none' if cut.checkpoint is None else cut.checkpoint.name}"
        problems = cut.unlike(EXIT_TRAINING) + cut.lost()
        table.add(Row(f"{kind} of rank {rank} of {nproc} at step {step}", "exit 1, nothing lost", happened, problems))
    cut = place.train("cut", *settings, nproc=next(turns))
    problems = cut.unlike(EXIT_DONE) or compare.bits(whole, cut)
    happened = "another run" if problems else f"equal: {compare.describe(whole)}"
    table.add(Row(f"the end at step {steps}", "the bits of an uninterrupted run", happened, problems))
    return table.conclude()


def draw_kills(chance: random.Random, steps: int, nprocs: Sequence[int]) -> list[Kill]:
    """One for each start, of any of its ranks; in the order of their steps, so that each start reaches its own. Every
    second one in the middle of a save."""
    if steps < 2:
        raise TrainingError(f"a run of {steps} step cannot be killed within; make it 2 steps or longer")
    at = sorted(chance.randrange(steps) for _ in nprocs)
    kinds = itertools.cycle(["sigkill", "sigkill_in_save"])
    return [(next(kinds), chance.randrange(nproc), step) for nproc, step in zip(nprocs, at, strict=True)]


def as_setting(kills: list[Kill]) -> str:
    faults = (f"{{kind: {k}, rank: {r}, step: {s}, attempt: {n}}}" for n, (k, r, s) in enumerate(kills, start=1))
    return f"faults=[{', '.join(faults)}]"
