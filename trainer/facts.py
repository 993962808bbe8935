"""What a checkpoint says of its run: what a resume compares, what decides its bits, what all ranks must have alike."""

import platform
from pathlib import Path
from typing import Any

import torch

from configs.contract import WorkerPlan
from configs.derive import BatchPlan
from configs.errors import ConfigError
from trainer.data import jpeg
from trainer.data.datasets import Data
from trainer.runtime import RunContext
from trainer.summary import versions

DECIDES_BITS = (
    *("device", "gpu", "cudnn", "processor", "cpu_capability"),
    *("precision", "channels_last", "compile", "threads_per_rank"),
)
"""What a resume may change, at the price of the bits. Libraries choose kernels by a processor's instruction sets
and caches, for which its name stands."""


def facts_of(
    plan: WorkerPlan, context: RunContext, data: Data, rank_bound_layers: list[str], batch: BatchPlan
) -> dict[str, Any]:
    """All but the network's memory format, `channels_last`, and the hash of its teacher's weights, `teacher`."""
    config = plan.config
    return facts_of_machine(context, plan) | {
        "config": config.model_dump(mode="json"),
        "classes": None if data.classes is None else list(data.classes),
        "num_classes": data.num_classes,
        "files": data.files,
        "num_train": len(data.train),
        "num_eval": len(data.evaluation),
        "global_batch_size": batch.global_batch_size,
        "drop_last": config.drop_last,
        "dtype": config.dtype,
        "optimizer": config.optim.name,
        "rank_bound_layers": rank_bound_layers,
        "world_size": context.world_size,
        "virtual_shards": config.virtual_shards,
        # Of an ordinary run it follows from the number of processes.
        "micro_batch": batch.max_micro_batch if config.virtual_shards else None,
        "decoder": None if data.files is None else jpeg.decoders(),
        "versions": versions(),
    }


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


def check_machines(context: RunContext, facts: dict[str, Any]) -> None:
    """Raise ConfigError where the ranks would not compute the same bits."""
    machine = {name: facts[name] for name in (*DECIDES_BITS, "decoder")} | {"torch": facts["versions"]["torch"]}
    fix = "use machines of one kind, or virtual_shards: 0"
    check_same(context, machine, "virtual_shards: the ranks would not compute the same bits", fix)


def check_same(context: RunContext, mine: dict[str, Any], what: str, fix: str = "they must be the same on all") -> None:
    """Raise ConfigError on all ranks, saying `what` and `fix`, if theirs differ from rank 0's."""
    everyones = context.gather_objects(mine)
    for rank, theirs in enumerate(everyones):
        changed = [key for key in theirs if theirs[key] != everyones[0][key]]
        if changed:
            values = ", ".join(f"{key}: {everyones[0][key]} on rank 0, {theirs[key]} on rank {rank}" for key in changed)
            raise ConfigError(f"{what}: {values}; {fix}")
