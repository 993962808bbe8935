"""What counting costs a step, on 64 x 10 logits and one thread: Lockstep's against torchmetrics'. Both in one process,
in torchmetrics' environment."""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.accuracy import ONE_THREAD
from benchmarks.harness import Row, Target, in_turn, not_measured, ratio_row, run_python

ROUNDS = 30
BATCH, CLASSES = 64, 10
CALLS = 500  # of a block: 5 to 100 ms
COUNT, LOSS = "Lockstep, top-1 and top-5", "Lockstep, mean loss"
UPDATE, FORWARD, MEAN = "torchmetrics, accuracy.update", "torchmetrics, accuracy.forward", "torchmetrics, mean.update"
Step = Callable[[Any, Any, Any], object]
"""Logits, labels and loss of a step in; counts them."""


def measure(rounds: int | None = None) -> list[Row]:
    """Blocks in turn."""
    try:
        python = environments.python_for("torchmetrics")
    except environments.NotInstallable as reason:
        return [not_measured("metrics", str(reason))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times"
        run_python(["-m", "benchmarks.metrics", str(path), str(rounds or ROUNDS)], ONE_THREAD, python)
        times = json.loads(path.read_text(encoding="ascii"))
    pairs = {"evaluation": (COUNT, UPDATE), "evaluation-forward": (COUNT, FORWARD), "training": (LOSS, MEAN)}
    limit = Target("<=", 15)
    return [ratio_row(f"metrics/{key}", times, *pair, "us a step", limit=limit) for key, pair in pairs.items()]


def measure_here(path: Path, rounds: int) -> None:
    """That process: write the microseconds a step of each block, by variant."""
    import torch

    torch.manual_seed(0)
    steps = [(torch.randn(BATCH, CLASSES), torch.randint(CLASSES, (BATCH,)), torch.rand(())) for _ in range(CALLS)]
    counting = lockstep(steps) | torchmetrics()
    modes = dict.fromkeys((COUNT, UPDATE, FORWARD), torch.inference_mode)  # as evaluation is done, by Lightning too
    variants = {name: blocks(step, steps, modes.get(name, nullcontext)) for name, step in counting.items()}
    in_turn(variants, 1)
    path.write_text(json.dumps(in_turn(variants, rounds)), encoding="ascii")


def blocks(step: Step, steps: list[tuple[Any, Any, Any]], mode: Callable[[], Any]) -> Callable[[], float]:
    """A function that takes all of `steps` and returns the microseconds of each."""

    def block() -> float:
        with mode():
            start = time.perf_counter()
            for values in steps:
                step(*values)
            return 1e6 * (time.perf_counter() - start) / len(steps)

    return block


def lockstep(steps: list[tuple[Any, Any, Any]]) -> dict[str, Step]:
    """What the evaluator and the training loop do with a batch; the counts are checked first."""
    import torch

    from benchmarks.jobs import tutorial_config
    from configs.contract import WorkerPlan
    from trainer.evaluate import best_classes, count_by_place
    from trainer.metrics import LossWindow
    from trainer.runtime import RunContext

    one = {"launcher": "direct", "device": "cpu", "world_size": 1, "local_world_size": 1, "threads_per_rank": 1}
    window = LossWindow(RunContext(WorkerPlan(mode="train", config=tutorial_config(), **one)))
    answers: list[tuple[torch.Tensor, torch.Tensor]] = []
    counts: list[int] = []

    def count(logits: Any, labels: Any, loss: Any) -> None:
        answers.append((best_classes(logits, 5), labels))
        if len(answers) == len(steps):  # as at the end of an evaluation
            counts[:] = count_by_place(answers, 5, logits.device).tolist()
            answers.clear()

    for values in steps:
        count(*values)
    by_hand = sum(int((logits.argmax(1) == labels).sum()) for logits, labels, _ in steps)
    assert (counts[0], counts[-1]) == (by_hand, len(steps) * BATCH)
    return {COUNT: count, LOSS: lambda logits, labels, loss: window.add(loss.item())}


def torchmetrics() -> dict[str, Step]:
    """Accuracy over all samples, whose default would be the mean over classes, and the mean of the loss."""
    from torchmetrics.aggregation import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy

    updated, called = (MulticlassAccuracy(num_classes=CLASSES, average="micro") for _ in range(2))
    mean = MeanMetric()
    return {
        UPDATE: lambda logits, labels, loss: updated.update(logits, labels),
        FORWARD: lambda logits, labels, loss: called(logits, labels),
        MEAN: lambda logits, labels, loss: mean.update(loss),
    }


if __name__ == "__main__":
    measure_here(Path(sys.argv[1]), int(sys.argv[2]))
