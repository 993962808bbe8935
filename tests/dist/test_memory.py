"""Out of memory, pretended: how it is told, what a smaller micro-batch changes, and the search for one that fits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.contract import WorkerPlan
from tests.dist.harness import Attempt, finished, in_ranks, run, tiny_config
from trainer import agreement, boundary, probe_batch
from trainer.runtime import RunContext

STREAMED = {"data__residency": "stream", "data__num_workers": 0}


def fits_at_most(samples: int, **more: Any) -> dict[str, Any]:
    return {"name": "tests.dist.toys:FitsAtMost", "args": {"samples": samples} | more}


def test_out_of_memory_in_training_is_told_by_its_kind_and_without_a_stack(tmp_path: Path) -> None:
    attempt = run(tmp_path, tiny_config(faults=[{"kind": "oom", "rank": 1, "step": 3}]), 2)
    assert attempt.statuses == [1, 1]
    assert (attempt.outcome(1).kind, attempt.outcome(1).step) == ("OutOfMemoryError", 3)
    assert attempt.outcome(0).kind == "peer"
    alone = run(tmp_path / "alone", tiny_config(model=fits_at_most(7)))
    assert (alone.outcome().kind, alone.outcome().step) == ("OutOfMemoryError", 0)
    assert "Traceback" not in alone.log()
    finished(tmp_path / "smaller", tiny_config(model=fits_at_most(4)), max_micro_batch=4)


def test_out_of_memory_in_evaluation_is_not_cured_by_a_smaller_micro_batch(tmp_path: Path) -> None:
    attempt = run(tmp_path, tiny_config(model=fits_at_most(4, training=False)), 2)
    first = next(outcome for outcome in attempt.outcomes if outcome and outcome.kind != "peer")
    assert (first.kind, first.exit_code, first.step) == ("environment error", 3, 8)
    assert (first.message or "").startswith("out of memory in evaluation: CUDA out of memory. ")
    assert (first.message or "").endswith("; use an eval.batch_size below 5")


@pytest.mark.parametrize("model", ["mlp", "tests.dist.toys:WithBatchNorm"])
def test_half_the_micro_batch_sees_the_same_samples(tmp_path: Path, model: str) -> None:
    config = tiny_config(model={"name": model}, log__every_steps=2, **STREAMED)

    def trained(name: str, **plan: Any) -> tuple[Attempt, list[str]]:
        reads = tmp_path / f"reads-{name}"
        attempt = finished(tmp_path / name, config, 2, {"READS": str(reads)}, **plan)
        return attempt, [Path(f"{reads}.{rank}").read_text() for rank in (0, 1)]

    whole, seen = trained("whole")
    halved, seen_in_halves = trained("halved", max_micro_batch=2)
    assert seen == seen_in_halves
    assert len(seen[0].split()) == 1 + 64  # the first sample, for its shape; half of two epochs
    assert [line for line in whole.log().splitlines() if line.startswith("memory ")] == []
    (said,) = [line for line in halved.log().splitlines() if line.startswith("memory ")]
    assert "micro-batches of 2, not 4, which ran out of memory" in said
    assert ("1 BatchNorm layer see" in said) == (model != "mlp")
    assert "per-device 2 x 2 processes x accumulation 2 = global 8" in halved.log()
    close = [torch.allclose(tensor, halved.weights()[name], atol=1e-5) for name, tensor in whole.weights().items()]
    assert all(close) == (model == "mlp")  # what BatchNorm sees is not the same


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_device_that_runs_out_of_memory_saves_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, deferred: bool
) -> None:
    rare = {"max_epochs": None, "max_steps": 5, "log__every_steps": 100, "checkpoint__every_epochs": None}
    monkeypatch.setattr(agreement, "DEFERRED", ["cuda", "cpu"] if deferred else ["cuda"])
    plain = finished(tmp_path / "plain", tiny_config(**rare, eval__every_epochs=None), world_size)
    assert plain.checkpoints() == ["best.json", "step_00000005"]
    monkeypatch.setattr(boundary, "SAVES_FIRST_STEP", ["cuda", "cpu"])
    saving = finished(tmp_path / "saving", tiny_config(**rare, eval__every_epochs=None), world_size)
    assert saving.checkpoints() == ["best.json", "step_00000001", "step_00000005"]
    assert all(torch.equal(tensor, saving.weights()[name]) for name, tensor in plain.weights().items())


@pytest.mark.parametrize(("world_size", "share"), [(1, 32), (2, 16)])
@pytest.mark.parametrize("samples", [1, 5, 11, 40])
def test_the_largest_micro_batch_is_found_by_real_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, share: int, samples: int
) -> None:
    monkeypatch.setattr(probe_batch, "TRIED", ["cpu"])
    config = tiny_config(global_batch_size=32, max_per_device_batch_size=3, model=fits_at_most(samples))
    plan = WorkerPlan("train", config, "torchrun", "cpu", world_size, world_size, 1)

    def search(_: RunContext) -> dict[str, int | bool]:
        return probe_batch.largest_micro_batch(plan)

    expected = {"largest_micro_batch": min(samples, share), "share": share, "is_estimate": False}
    assert in_ranks(tmp_path, 1, search) == [expected]


def test_where_it_cannot_be_tried_it_is_an_estimate(tmp_path: Path) -> None:
    plan = WorkerPlan("train", tiny_config(), "direct", "cpu", 1, 1, 1)
    expected = {"largest_micro_batch": 8, "share": 8, "is_estimate": True}
    assert in_ranks(tmp_path, 1, lambda _: probe_batch.largest_micro_batch(plan)) == [expected]
