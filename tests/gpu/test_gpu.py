"""The real commands on real GPUs. Everywhere else these tests skip and say why."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import alone, nothing, saver_of
from trainer.checkpoint import Snapshot, load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def launch(tmp_path: Path, *arguments: str) -> dict[str, object]:
    command = [sys.executable, "-m", "launch", "train", *arguments, "--run-name", "gpu", "--runs-dir", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result: dict[str, object] = json.loads((tmp_path / "gpu" / "result.json").read_text(encoding="utf-8"))
    return result


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_mnist_reaches_its_accuracy(tmp_path: Path, precision: str) -> None:
    result = launch(tmp_path, "configs/mnist.yaml", f"mixed_precision={precision}", "expect.min_top1=0.994")
    assert result["precision"] == precision


def test_auto_is_fp16_on_cuda(tmp_path: Path) -> None:
    assert launch(tmp_path, "configs/smoke.yaml", "mixed_precision=auto")["precision"] == "fp16"


def test_all_gpus_see_the_same_samples_as_one(tmp_path: Path) -> None:
    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip("one GPU only")
    arguments = ("configs/tutorial.yaml", "dtype=float64", "max_epochs=null", "max_steps=100")
    alone = launch(tmp_path / "1", *arguments)
    together = launch(tmp_path / "n", *arguments, "--nproc", str(gpus))
    assert alone["metrics"] == pytest.approx(together["metrics"], rel=1e-9)


def test_a_micro_batch_is_tried_on_the_gpu() -> None:
    command = [sys.executable, "-m", "launch", "plan", "configs/mnist.yaml", "--probe-batch"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "a rank's whole share of 256 samples at a time, as tried; nothing to set" in ended.stdout


def test_a_checkpoint_is_taken_after_the_first_step(tmp_path: Path) -> None:
    launch(tmp_path, "configs/smoke.yaml", "mixed_precision=no")
    log = tmp_path / "gpu" / "attempts" / "001" / "logs" / "rank0.log"
    assert "saved step_00000001" in log.read_text(encoding="utf-8").splitlines()


def test_a_checkpoint_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    """The copies are enqueued before what changes the weights next, however long the queue is."""
    size = 4096
    weights, noise = torch.zeros(size, size, device="cuda"), torch.randn(size, size, device="cuda")
    saver = saver_of(alone(), tmp_path)
    for step in range(3):
        for _ in range(20):
            noise = noise @ noise / size  # keeps the device busy
        saver.settle()
        saver.save(
            Snapshot(step, {"model": {"w": weights}, "optimizer": {}}, {}, {"world_size": 1}),
            is_best=False, before=nothing,
        )  # fmt: skip
        weights += 1
    saver.settle()
    for step in range(3):
        assert bool((load(tmp_path / f"step_{step:08d}").shared["model"]["w"] == step).all())


def test_mfu_is_a_share_of_the_peak_or_said_to_be_unknown(tmp_path: Path) -> None:
    found = launch(tmp_path, "configs/mnist.yaml", "max_epochs=1", "mixed_precision=fp16")["arithmetic"]
    assert isinstance(found, dict)
    assert found["flops_per_sample"] > found["forward_flops_per_sample"] > 0
    log = (tmp_path / "gpu" / "attempts" / "001" / "logs" / "rank0.log").read_text(encoding="utf-8")
    if found["mfu"] is None:
        assert log.count("note: TFLOP/s without MFU: no peak is known of") == 1
    else:
        assert 0 < found["mfu"] < 1
    assert "layout     channels_last" in log


def test_whether_compiling_pays_is_measured(tmp_path: Path) -> None:
    launch(tmp_path, "configs/mnist.yaml", "max_epochs=null", "max_steps=200", "compile=auto")
    found = json.loads((tmp_path / "gpu" / "compile.json").read_text(encoding="utf-8"))
    assert found["device"] == "cuda"
    assert "failed" not in found["why"]
