"""Virtual shards on real GPUs: the same bits on one and on several, and each time. Elsewhere they skip and say why."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
SHORT = ("virtual_shards=4", "max_epochs=null", "max_steps=30", "log.every_steps=5")
NETS = {
    "batchnorm": ("configs/mnist.yaml",),
    "mlp": ("configs/tutorial.yaml",),
    "dropout": (
        "configs/mnist.yaml", "model.name=tests.dist.odd_nets:Transformer", "model.args={width: 28}",
        "max_per_device_batch_size=24",
    ),
}  # fmt: skip


def launch(tmp_path: Path, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "launch", *arguments, "--runs-dir", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("net", NETS)
def test_the_same_bits_on_any_number_of_gpus(tmp_path: Path, net: str, precision: str) -> None:
    """With one GPU the same command twice: kernels must not add in the order in which their threads come."""
    numbers = [number for number in (1, 2, 4) if number <= GPUS] if GPUS > 1 else [1, 1]
    nproc = ",".join(map(str, numbers))
    settings = (*NETS[net], *SHORT, f"mixed_precision={precision}")
    output = launch(tmp_path, "verify", "topology", *settings, "--bitwise", "--nproc", nproc)
    assert output.splitlines()[-1] == f"{len(numbers) - 1} of {len(numbers) - 1} hold"


def test_killed_and_gone_on_with_on_other_gpus(tmp_path: Path) -> None:
    if GPUS < 2:
        pytest.skip("one GPU only")
    output = launch(tmp_path, "verify", "resume", *NETS["batchnorm"], *SHORT, "--nproc", "2,1", "--kills", "3")
    assert output.splitlines()[-1] == "4 of 4 hold"


class Pooled(nn.Sequential):
    """The backward pass of its second layer has no deterministic kernel on a GPU."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Conv2d(1, 8, 3), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(32, num_classes))


def test_an_operation_without_a_deterministic_kernel_is_named(tmp_path: Path) -> None:
    model = ("model.name=tests.gpu.test_shards:Pooled", "model.args={}")
    output = launch(tmp_path, "train", "configs/mnist.yaml", *model, *SHORT, "--nproc", "1", code=2)
    said = f"adaptive_max_pool2d_backward_cuda (layer 1) has no deterministic kernel on {torch.cuda.get_device_name()}"
    assert f"virtual_shards: {said}, and equal bits need one; use another layer or virtual_shards: 0" in output


def test_the_probe_tells_what_it_costs(tmp_path: Path) -> None:
    output = launch(tmp_path, "plan", "configs/mnist.yaml", *SHORT, "--probe", "--nproc", "1")
    assert "\nbits cost      a step of one process's share takes " in output
