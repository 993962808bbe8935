"""What this machine offers, as facts: cores, GPUs, shared memory. Read from files, never by importing torch."""

import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Topology:
    """Facts about one machine, already limited by affinity, cgroup and CUDA_VISIBLE_DEVICES."""

    cores: int
    num_gpus: int
    gpu_reason: str | None
    """Why torch sees no GPU; None when it sees one."""
    has_amx: bool
    """The CPU has it. The ranks also ask the kernel's leave, which some sandboxes refuse: then their `auto` is no."""
    shm_bytes: int | None
    system: str = "Linux"
    has_mps: bool = False
    cuda_visible_devices: str | None = None


def detect_topology(
    environ: Mapping[str, str],
    *,
    root: Path = Path("/"),
    affinity: int | None = None,
    torch_version: Path | None = None,
) -> Topology:
    """Read the machine. `root`, `affinity` and `torch_version` (torch/version.py) replace the real ones in tests."""
    system = platform.system()
    version_file = torch_version or find_torch_version()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    num_gpus, reason = _gpus(root, visible, version_file)
    return Topology(
        cores=_cores(root, affinity),
        num_gpus=num_gpus,
        gpu_reason=reason,
        has_amx="amx_bf16" in _read(root / "proc/cpuinfo").split(),
        shm_bytes=_shm_bytes(root / "dev/shm"),
        system=system,
        has_mps=system == "Darwin" and platform.machine() == "arm64",
        cuda_visible_devices=visible,
    )


def find_torch_version() -> Path | None:
    """The file that says how the installed torch was built; find_spec of a top-level package does not import it."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).with_name("version.py") if spec and spec.origin else None


def _gpus(root: Path, visible: str | None, version_file: Path | None) -> tuple[int, str | None]:
    if version_file is None:
        return 0, "torch is not installed"
    if not re.search(r"^cuda\b[^=]*=\s*['\"][\d.]+['\"]", _read(version_file), re.MULTILINE):
        return 0, "the installed torch is built for CPU only"
    devices = _num_gpu_devices(root)
    if devices == 0:
        return 0, "no NVIDIA driver, there is no /dev/nvidia0"
    num_visible = _num_visible(visible, devices)
    if num_visible == 0:
        named = f"CUDA_VISIBLE_DEVICES={visible} names no GPU here"
        return 0, "CUDA_VISIBLE_DEVICES is empty" if visible == "" else named
    return num_visible, None


def _num_gpu_devices(root: Path) -> int:
    names = [path.name for path in (root / "dev").glob("nvidia*")]
    # WSL shows its GPUs as one device file, whatever their number.
    return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in names) or int((root / "dev/dxg").exists())


def _num_visible(visible: str | None, devices: int) -> int:
    """CUDA reads the list up to the first entry that names no device; a UUID cannot be checked here and counts."""
    if visible is None:
        return devices
    count = 0
    for entry in (part.strip() for part in visible.split(",")):
        if not (entry.startswith(("GPU-", "MIG-")) or (entry.isdigit() and int(entry) < devices)):
            break
        count += 1
    return count


def _cores(root: Path, affinity: int | None) -> int:
    if affinity is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = min((_quota_v2(path) for path in _cgroup_folders(root, "")), default=float("inf"))
    quota = min(quota, *(_quota_v1(path) for path in _cgroup_folders(root, "cpu")), float("inf"))
    # A quota of 1.5 cores cannot keep two busy threads in step: round down.
    return max(1, int(min(affinity, quota)))


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """This process's cgroup and its parents, any of which may hold a limit. `controller` is "" for cgroup v2."""
    base = root / "sys/fs/cgroup" / controller
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = base / path.lstrip("/")
            return [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return [base]


def _quota_v2(folder: Path) -> float:
    words = _read(folder / "cpu.max").split()
    return float(words[0]) / float(words[1]) if len(words) == 2 and words[0] != "max" else float("inf")


def _quota_v1(folder: Path) -> float:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else float("inf")


def _shm_bytes(path: Path) -> int | None:
    if not path.is_dir():
        return None
    stats = os.statvfs(path)
    return stats.f_frsize * stats.f_blocks


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
