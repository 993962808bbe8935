"""Where the batches of a run are made: on the device, or through workers."""

import os

import torch

from configs.errors import EnvironmentProblem
from configs.schema import DataConfig
from trainer.data.datasets import MapStyle, TensorSplit, materialise
from trainer.data.resident import ResidentSource
from trainer.data.stream import StreamSource

Source = ResidentSource | StreamSource

# The share of the device's free memory that `auto` lets the data take: the rest is for activations.
_SHARE = 0.25


def free_bytes(device: torch.device, local_world_size: int) -> int:
    """Free memory for one rank, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_world_size


def choose_residency(
    config: DataConfig, splits: tuple[MapStyle, MapStyle], device: torch.device, local_world_size: int
) -> tuple[str, str]:
    """Returns ("device" or "stream", the reason with the bytes)."""
    size = sum(split.num_bytes for split in splits if isinstance(split, TensorSplit))
    free = free_bytes(device, local_world_size)
    place = device.type
    if config.residency == "stream":
        return "stream", f"through {config.num_workers} workers per rank, as data.residency says"
    if config.residency == "device":
        if size > free:
            raise EnvironmentProblem(
                f"data.residency: device needs {size:,} bytes on {place} and {free:,} are free; "
                "use data.residency: stream"
            )
        return "device", f"{size:,} bytes on {place}" if size else f"on {place}"
    if not all(isinstance(split, TensorSplit) for split in splits):
        return "stream", f"through {config.num_workers} workers per rank; a module:callable may read what does not fit"
    if size > _SHARE * free:
        return (
            "stream",
            f"through {config.num_workers} workers per rank: {size:,} bytes are too many for {place} ({free:,} free)",
        )
    return "device", f"{size:,} bytes on {place}"


def build_source(split: MapStyle, residency: str, config: DataConfig, seed: int, device: torch.device) -> Source:
    """The source of one split."""
    if residency == "device":
        return ResidentSource(materialise(split), device)
    return StreamSource(split, seed, config.num_workers, device)
