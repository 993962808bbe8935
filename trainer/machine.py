"""Which facts of the machine decide the bits of a run, besides its data, settings and order."""

import platform
from pathlib import Path
from typing import Any

import torch

from configs.contract import WorkerPlan
from trainer.runtime import RunContext

DECIDES_BITS = (
    *("device", "gpu", "cudnn", "processor", "cpu_capability"),
    *("precision", "channels_last", "compile", "threads_per_rank"),
)
"""What a resume may change, at the price of the bits. Libraries choose kernels by a processor's instruction sets
and caches, for which its name stands."""


def facts_of_machine(context: RunContext, plan: WorkerPlan) -> dict[str, Any]:
    """All of DECIDES_BITS but the network's memory format; None where the device has no such thing."""
    on_cpu, on_cuda = plan.device == "cpu", plan.device == "cuda"
    return {
        "device": plan.device,
        "gpu": torch.cuda.get_device_name(context.device) if on_cuda else None,
        "cudnn": torch.backends.cudnn.version() if on_cuda else None,
        "processor": processor_name() if on_cpu else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability() if on_cpu else None,
        "precision": context.precision,
        "compile": plan.compiles,
        "threads_per_rank": plan.threads_per_rank if on_cpu else None,
    }


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model's name as Linux gives it, elsewhere as Python does; may be empty."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
