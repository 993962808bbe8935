"""Virtual shards and what changes between starts: the number of processes does not matter, the rest is said."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.harness import finished, run
from tests.dist.test_shards import RAGGED, assert_same_bits, config_of
from trainer import agreement


@pytest.mark.parametrize("case", ["batchnorm", "dropout", "adamw, clipped", "fp16", "odd buffers"])
def test_a_killed_run_goes_on_elsewhere_with_the_same_bits(tmp_path: Path, case: str) -> None:
    whole = finished(tmp_path / "whole", config_of(case), 1, RAGGED)
    kills = [{"kind": "sigkill", "step": 3, "attempt": 1}, {"kind": "sigkill", "step": 5, "attempt": 2}]
    config = config_of(case, checkpoint__every_steps=1, faults=kills)
    for world_size in (4, 1):
        assert -9 in run(tmp_path / "cut", config, world_size, RAGGED).statuses
    cut = finished(tmp_path / "cut", config, 2, RAGGED)
    assert_same_bits(whole, cut)
    assert "not the same bits" not in cut.log()


@pytest.mark.parametrize("case", ["batchnorm", "fp16, skipped"])
def test_from_eight_to_two_to_four(tmp_path: Path, case: str) -> None:
    changes: dict[str, Any] = {"virtual_shards": 8, "global_batch_size": 16, "max_epochs": 5, "log__every_steps": 3}
    whole = finished(tmp_path / "whole", config_of(case, **changes), 1, RAGGED)
    # In the second and third epoch: with fp16 six of the ten updates are skipped, and the step stays the same.
    steps = (1, 2) if case == "fp16, skipped" else (3, 5)
    kills = [{"kind": "sigkill", "step": step, "attempt": n} for n, step in enumerate(steps, start=1)]
    config = config_of(case, **changes, checkpoint__every_steps=1, faults=kills)
    for world_size in (8, 2):
        assert -9 in run(tmp_path / "cut", config, world_size, RAGGED).statuses
    assert_same_bits(whole, finished(tmp_path / "cut", config, 4, RAGGED))


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "a step later"])
def test_a_stop_of_one_rank_stops_all_and_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    monkeypatch.setattr(agreement, "DEFERRED", ["cuda", "cpu"] if deferred else ["cuda"])
    config = config_of("dropout", log__every_steps=100)
    whole = finished(tmp_path / "whole", config, 1, RAGGED)
    # In the second pass of the second step of rank 1 of two, which has two shards.
    stopped = run(tmp_path / "cut", config, 2, RAGGED | {"STOP_AT": "3", "STOP_RANK": "1"})
    assert {(outcome.status, outcome.step) for outcome in stopped.outcomes if outcome} == {("stopped", 2 + deferred)}
    assert_same_bits(whole, finished(tmp_path / "cut", config, 4, RAGGED))


TWO_THREADS: dict[str, Any] = {
    "model": {"name": "tests.dist.odd_nets:Table"},
    "virtual_shards": 2,
    "global_batch_size": 128,
    "max_epochs": 1,
}
"""Large enough for two threads to share the work, and to add in any order if they may."""


def test_two_threads_a_rank(tmp_path: Path) -> None:
    config = config_of("mlp", **TWO_THREADS)
    size = {"TRAIN_SIZE": "448"}
    alone, together = (finished(tmp_path / str(n), config, n, size, threads_per_rank=2) for n in (1, 2))
    assert_same_bits(alone, together)
    assert together.checkpoint().state["threads_per_rank"] == 2


def test_another_number_of_threads_is_said(tmp_path: Path) -> None:
    finished(tmp_path, config_of("dropout", max_epochs=1), 2, RAGGED, threads_per_rank=2)
    log = finished(tmp_path, config_of("dropout"), 4, RAGGED).log()
    assert "goes on elsewhere (threads_per_rank 2 -> 1): the same samples, not the same bits\n" in log
    assert "other random numbers" not in log  # they are keyed, and drawn by one thread


def test_another_processor_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "Z80")
    finished(tmp_path, config_of("mlp", max_epochs=1), 1, RAGGED)
    monkeypatch.undo()
    log = finished(tmp_path, config_of("mlp"), 2, RAGGED).log()
    assert f"goes on elsewhere (cpu_capability Z80 -> {now}): the same samples, not the same bits\n" in log


def test_smaller_micro_batches_are_said(tmp_path: Path) -> None:
    finished(tmp_path, config_of("mlp", max_epochs=1), 1, RAGGED)
    log = finished(tmp_path, config_of("mlp"), 2, RAGGED, max_micro_batch=1).log()
    assert "goes on elsewhere (micro_batch 2 -> 1): the same samples, not the same bits\n" in log


def test_shards_that_are_switched_on_later_begin_with_the_same_statistics_on_all_ranks(tmp_path: Path) -> None:
    finished(tmp_path, config_of("batchnorm", virtual_shards=0, max_epochs=1), 2, RAGGED)
    later = finished(tmp_path, config_of("batchnorm"), 2, RAGGED)
    one, other = later.checkpoint().ranks
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items() if name != "window")
    assert "goes on elsewhere (virtual_shards 0 -> 4, micro_batch None -> 2): " in later.log()


def test_ranks_on_different_processors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: f"AVX-{os.environ['RANK']}")
    attempt = run(tmp_path / "shards", config_of("mlp"), 2)
    assert attempt.statuses == [2, 2]
    said = "virtual_shards: the ranks would not compute the same bits: cpu_capability: AVX-0 on rank 0, AVX-1 on rank 1"
    assert said in (attempt.outcome().message or "")
    finished(tmp_path / "ordinary", config_of("mlp", virtual_shards=0), 2)
