"""Where the batches of a run are made: on the device, or through workers."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from configs.contract import WorkerPlan
from configs.data_section import DataConfig
from configs.derive import counted
from configs.errors import ConfigError, EnvironmentProblem
from configs.image_sizes import training_sizes
from trainer.data.datasets import MapStyle, TensorSplit, as_image_tensor
from trainer.data.policies import Policy
from trainer.data.resident import ResidentSource
from trainer.data.stream import KeyedSamples, StreamSource
from trainer.data.workers import PREFETCH, check_shared_memory
from trainer.stop import StopFlag

Source = ResidentSource | StreamSource

# The share of the device's free memory that `auto` lets the data take: the rest is for activations.
_SHARE = 0.25


def free_bytes(device: torch.device, local_world_size: int) -> int:
    """Free memory for one rank, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _available_bytes() // local_world_size


def _available_bytes() -> int:
    """What this machine can still give, page cache included; half of its memory where it does not tell."""
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min(int(re.findall(r"MemAvailable:\s*(\d+)", meminfo)[0]) * 1024, _left_in_cgroup())


def _left_in_cgroup() -> int:
    """What the container's limit (cgroup v2) leaves, if there is one."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text(), (folder / "memory.current").read_text()
    except OSError:
        return sys.maxsize
    return sys.maxsize if limit.strip() == "max" else max(0, int(limit) - int(used))


def materialise(split: MapStyle, seed: int, num_classes: int, alive: Callable[[], None] = lambda: None) -> TensorSplit:
    """Read every sample once into one array, with the randomness of epoch 0 if it has any; `alive` is called for each.

    Raises ConfigError if the images are not uint8 of one shape.
    """
    if isinstance(split, TensorSplit):
        return split
    samples = KeyedSamples(split, seed, num_classes)
    pairs = []
    for index in range(len(split)):
        pairs.append(samples.sample(0, index))
        alive()
    images, labels = zip(*pairs, strict=True)
    first = images[0]
    for index, image in enumerate(images):
        if image.shape != first.shape or image.dtype != torch.uint8:
            beside = f" and sample 0 {tuple(first.shape)}" if index else ""
            raise ConfigError(
                f"data.residency: device needs uint8 images of one shape; sample {index} is {image.dtype} "
                f"{tuple(image.shape)}{beside}; use data.residency: stream"
            )
    return TensorSplit(torch.stack(images), torch.tensor(labels))


def choose_residency(
    config: DataConfig, splits: tuple[MapStyle, ...], device: torch.device, local_world_size: int, num_workers: int
) -> tuple[str, str]:
    """Returns ("device" or "stream", the reason with the bytes)."""
    size = sum(split.num_bytes for split in splits if isinstance(split, TensorSplit))
    free = free_bytes(device, local_world_size)
    place, workers = device.type, counted(num_workers, "worker")
    if config.residency == "stream":
        return "stream", f"through {workers} per rank, as data.residency says"
    if config.augment.changes_single_images:
        return "stream", f"through {workers} per rank, which change each image"
    if config.residency == "device":
        if size > free:
            raise EnvironmentProblem(
                f"data.residency: device needs {size:,} bytes on {place} and {free:,} are free; "
                "use data.residency: stream"
            )
        return "device", f"{size:,} bytes on {place}"
    if not all(isinstance(split, TensorSplit) for split in splits):
        return "stream", f"through {workers} per rank; {config.name} may hold more than fits"
    if size > _SHARE * free:
        return (
            "stream",
            f"through {workers} per rank: {size:,} bytes are too many for {place} ({free:,} free)",
        )
    return "device", f"{size:,} bytes on {place}"


def build_source(
    split: MapStyle,
    residency: str,
    num_workers: int,
    seed: int,
    num_classes: int,
    device: torch.device,
    stop: StopFlag | None = None,
    policy: Policy | None = None,
) -> Source:
    """The source of one split, whose images `policy` changes in training. Once `stop` is set, loader workers that die
    are no error."""
    if residency == "device":
        return ResidentSource(materialise(split, seed, num_classes), device)
    return StreamSource(split, seed, num_classes, num_workers, device, stop, policy)


def check_loaders(plan: WorkerPlan, splits: tuple[MapStyle, MapStyle], *, streams: bool) -> list[str]:
    """Whether what loader workers read ahead fits in shared memory.

    Raises EnvironmentProblem if that of the training does not; returns a warning if that of an evaluation may not.
    """
    workers = plan.num_workers
    if not streams or workers == 0:
        return []
    train_bytes, eval_bytes = (as_image_tensor(split[0][0]).nbytes for split in splits)
    if sizes := training_sizes(plan.config.data):
        train_bytes = train_bytes * max(sizes) ** 2 // (plan.config.data.image_size or 1) ** 2
    batch = min(plan.config.eval.batch_size, len(splits[1]))
    ahead = min(workers * PREFETCH, -(-len(splits[1]) // (batch * plan.world_size)))
    train_bytes *= plan.batches.max_micro_batch
    return check_shared_memory(plan.local_world_size, workers, train_bytes, ahead * batch * eval_bytes)
