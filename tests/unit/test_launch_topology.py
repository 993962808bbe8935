"""The machine is read from files, so any machine can be had in a test."""

from pathlib import Path

import pytest

from launch.topology import Topology, detect_topology

CUDA_BUILD = "__version__ = '2.14.1+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
CPU_BUILD = "__version__ = '2.14.1+cpu'\ncuda: Optional[str] = None\n"


def machine(
    root: Path, files: dict[str, str], *, torch: str = CUDA_BUILD, affinity: int = 8, visible: str | None = None
) -> Topology:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root.mkdir(exist_ok=True)
    version = root / "version.py"
    version.write_text(torch)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return detect_topology(environ, root=root, affinity=affinity, torch_version=version)


def gpus(number: int) -> dict[str, str]:
    return {f"dev/nvidia{index}": "" for index in range(number)} | {"dev/nvidiactl": "", "dev/nvidia-uvm": ""}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 4),
        ("0", 1),
        ("0,2", 2),
        ("3,1,0", 3),
        ("1,7,0", 1),
        ("-1", 0),
        ("", 0),
        ("0,-1,2", 1),
        ("GPU-1a,GPU-2b", 2),
    ],
)
def test_gpus_are_device_files_limited_by_the_visible_list(tmp_path: Path, visible: str | None, expected: int) -> None:
    topology = machine(tmp_path, gpus(4), visible=visible)
    assert topology.num_gpus == expected
    assert (topology.gpu_reason is None) == (expected > 0)


@pytest.mark.parametrize(
    ("files", "torch", "visible", "reason"),
    [
        ({}, CUDA_BUILD, None, "no NVIDIA driver"),
        (gpus(1), CPU_BUILD, None, "built for CPU only"),
        (gpus(1), CUDA_BUILD, "", "CUDA_VISIBLE_DEVICES is empty"),
        (gpus(1), CUDA_BUILD, "5", "CUDA_VISIBLE_DEVICES=5"),
    ],
)
def test_says_why_torch_sees_no_gpu(
    tmp_path: Path, files: dict[str, str], torch: str, visible: str | None, reason: str
) -> None:
    topology = machine(tmp_path, files, torch=torch, visible=visible)
    assert topology.num_gpus == 0
    assert reason in str(topology.gpu_reason)


def test_cores_are_limited_by_affinity_and_the_quota_of_any_parent_cgroup(tmp_path: Path) -> None:
    v2 = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
    }
    assert machine(tmp_path / "none", {}).cores == 8
    assert machine(tmp_path / "v2", v2).cores == 2
    v1 = {
        "proc/self/cgroup": "3:cpu,cpuacct:/job\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    }
    assert machine(tmp_path / "v1", v1).cores == 1
    unlimited = v1 | {"sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n"}
    assert machine(tmp_path / "v1-unlimited", unlimited, affinity=3).cores == 3


def test_amx(tmp_path: Path) -> None:
    files = {
        "proc/cpuinfo": "flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n",
    }
    topology = machine(tmp_path, files)
    assert topology.has_amx
    assert topology.shm_bytes is None
