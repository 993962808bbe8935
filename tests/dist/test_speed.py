"""FLOPs are counted in a running training, which does not feel it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from configs.contract import WorkerPlan
from tests.dist.harness import Attempt, finished, in_ranks, tiny_config
from trainer import probe_input, speed
from trainer.probe import build_alone
from trainer.runtime import RunContext

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "batchnorm, bf16, channels last": (
        1,
        {"model": {"name": "tests.dist.toys:WithBatchNorm"}, "mixed_precision": "bf16", "channels_last": True},
    ),
    "dropout, two ranks, accumulation": (
        2,
        {"model": {"name": "tests.dist.toys:WithDropout"}, "max_per_device_batch_size": 2},
    ),
    "virtual shards": (2, {"model": {"name": "tests.dist.toys:WithBatchNorm"}, "virtual_shards": 4}),
    "compile": (1, {"compile": True}),
}


@pytest.fixture
def compiles_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch._dynamo, but not through a C++ compiler."""
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compile_module(self, backend="eager"))


def flops_of(attempt: Attempt) -> int:
    found = attempt.result()["arithmetic"]["flops_per_sample"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_a_training_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles_quickly: None, case: str
) -> None:
    world_size, changes = CASES[case]
    config = tiny_config(**changes)
    counted = finished(tmp_path / "counted", config, world_size)
    monkeypatch.setattr(speed, "is_cheap", lambda *_: False)
    plain = finished(tmp_path / "plain", config, world_size)
    assert flops_of(counted) > 0
    assert plain.result()["arithmetic"] is None
    for name, tensor in plain.export().items():
        assert torch.equal(tensor, counted.export()[name]), name
    assert plain.lines() == counted.lines()


def test_each_log_point_has_the_flops_of_a_device(tmp_path: Path) -> None:
    attempt = finished(tmp_path, tiny_config(), 2)
    # 8x8 pixels -> 16 -> 4: forward, the weights' gradients, and that of the second layer's input.
    assert flops_of(attempt) == 2 * (64 * 16 + 16 * 4) * 2 + 2 * 16 * 4
    speeds, rates = attempt.events("perf/tflops"), attempt.events("perf/images_per_sec")
    assert len(speeds) == len(rates) > 5
    for (step, tflops), (other, images) in zip(speeds, rates, strict=True):
        assert step == other
        assert tflops == pytest.approx(images * flops_of(attempt) / 2 / 1e12, rel=1e-5)
    assert "  FLOPs           4,480 per sample, 2,176 of them forward; " in attempt.log()
    assert "MFU" not in attempt.log()
    assert attempt.result()["arithmetic"]["mfu"] is None


def test_a_network_that_cannot_be_counted_is_told_once_and_trained(tmp_path: Path) -> None:
    attempt = finished(tmp_path, tiny_config(model={"name": "tests.dist.toys:Uncountable"}))
    told = "note: no FLOPs: the network cannot be counted without data (ValueError: no image)"
    assert attempt.log().count(told) == 1
    assert attempt.result()["arithmetic"]["flops_per_sample"] is None
    assert "perf/tflops" not in attempt.run_dir.metrics.read_text(encoding="utf-8")


def test_a_chip_that_no_table_has_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = speed.count_speed

    def as_on_a_gpu(job: Any) -> speed.Speed:
        job.facts["gpu"] = "NVIDIA X9000"
        return count(job)

    monkeypatch.setattr(speed, "count_speed", as_on_a_gpu)
    log = finished(tmp_path, tiny_config()).log()
    assert log.count("note: TFLOP/s without MFU: no peak is known of NVIDIA X9000 in fp32") == 1


def test_a_probe_reads_streamed_data_with_several_numbers_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_input, "_LONG_ENOUGH_S", 0.0)
    plan = WorkerPlan("train", tiny_config(data__residency="stream", data__num_workers=0), "direct", "cpu", 1, 1, 1)

    def measure(_: RunContext) -> dict[str, float]:
        with build_alone(plan) as job:
            return probe_input.measure_input(job, plan.num_workers, cores=2)

    ((found),) = in_ranks(tmp_path, 1, measure)
    assert found.keys() == {"0", "1", "2"}
    assert min(found.values()) > 0
