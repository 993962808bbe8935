"""Pure arithmetic on what the user chose: slices, batches, steps, learning rates. No torch, no files."""

import math
from dataclasses import dataclass

from configs.errors import ConfigError
from configs.schema import RunConfig


def counted(number: int, noun: str) -> str:
    """`1 process`, `2 processes`."""
    plural = noun if number == 1 else f"{noun}es" if noun.endswith(("s", "tch")) else f"{noun}s"
    return f"{number} {plural}"


def slice_bounds(total: int, part: int, parts: int, unit: int = 1) -> tuple[int, int]:
    """The `part`-th of `parts` contiguous slices of range(total): sizes differ by at most one, any `parts` works. With
    `unit` they are cut between groups of so many."""
    units = -(-total // unit)
    return min(part * units // parts * unit, total), min((part + 1) * units // parts * unit, total)


def num_pieces(total: int, part: int, parts: int, max_micro_batch: int, unit: int = 1) -> int:
    """Micro-batches that the `part`-th of `parts` slices of a batch of `total` samples is cut into."""
    start, stop = slice_bounds(total, part, parts, unit)
    if stop - start <= max_micro_batch:
        return int(stop > start)
    return -(-(stop - start) // (max(1, max_micro_batch // unit) * unit))


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is cut. Sizes are samples; a micro-batch is what one forward pass sees."""

    global_batch_size: int
    world_size: int
    max_slice: int
    max_micro_batch: int
    gradient_accumulation_steps: int
    unit: int = 1
    """Samples that are never parted."""

    @property
    def is_even(self) -> bool:
        pieces = self.world_size * self.gradient_accumulation_steps
        return pieces == 1 or self.global_batch_size % (pieces * self.unit) == 0

    def describe(self) -> str:
        arithmetic = (
            f"per-device {self.max_micro_batch} x {counted(self.world_size, 'process')} x accumulation "
            f"{self.gradient_accumulation_steps} = global {self.global_batch_size}"
        )
        return arithmetic if self.is_even else f"{arithmetic}, cut into uneven slices (exact all the same)"


def plan_batches(config: RunConfig, world_size: int, max_micro_batch: int | None = None) -> BatchPlan:
    """Cut the global batch for `world_size` ranks; `max_micro_batch` is what fits, where that was found out.

    Raises ConfigError if a rank would never get a sample.
    """
    if config.global_batch_size is not None:
        total = config.global_batch_size
    else:
        assert config.per_device_batch_size is not None
        total = config.per_device_batch_size * world_size
    unit = config.data.augment.unit
    units = -(-total // unit)
    if units < world_size:
        too_few = _too_few(total, unit, f"the number of processes, {world_size}")
        least = (world_size - 1) * unit + 1
        raise ConfigError(f"{too_few}; use global_batch_size={least} or more, or no more than {units} of them")
    parts = world_size
    if config.virtual_shards:
        check_shards(config.virtual_shards, total, world_size, unit)
        parts = config.virtual_shards
    part, max_slice = (_largest(total, number, unit) for number in (parts, world_size))
    most = min(config.max_per_device_batch_size or part, max_micro_batch or part)
    pieces = 1 if part <= most else -(-part // (max(1, most // unit) * unit))
    max_micro_batch = part if pieces == 1 else -(-part // (pieces * unit)) * unit
    return BatchPlan(total, world_size, max_slice, max_micro_batch, pieces * parts // world_size, unit)


def _largest(total: int, parts: int, unit: int) -> int:
    bounds = (slice_bounds(total, part, parts, unit) for part in range(parts))
    return max(stop - start for start, stop in bounds)


def check_shards(shards: int, global_batch_size: int, world_size: int, unit: int = 1) -> None:
    """Raise ConfigError if the shards do not divide over the processes, or cannot all have samples, of which `unit` are
    never parted."""
    if shards % world_size:
        fitting = fitting_processes(shards)
        fix = f"one of {', '.join(map(str, fitting))} processes" if len(fitting) > 1 else "one process"
        raise ConfigError(f"virtual_shards={shards} does not divide over {world_size} processes; use {fix}")
    if -(-global_batch_size // unit) < shards:
        too_few = _too_few(global_batch_size, unit, f"virtual_shards={shards}")
        raise ConfigError(f"{too_few}; use a larger batch or fewer shards")


def _too_few(total: int, unit: int, parts: str) -> str:
    groups = "" if unit == 1 else f", in groups of {unit} that are mixed with each other,"
    return f"global_batch_size={total}{groups} is smaller than {parts}"


def fitting_processes(shards: int) -> list[int]:
    """The numbers of processes over which this power of two divides."""
    return [2**power for power in range(shards.bit_length())]


def steps_per_epoch(num_samples: int, global_batch_size: int, *, drop_last: bool) -> int:
    """Global batches in one epoch. Raises ConfigError if there would be none."""
    if num_samples == 0:
        raise ConfigError("the training split is empty: 0 samples")
    if drop_last and num_samples < global_batch_size:
        raise ConfigError(
            f"drop_last: true leaves nothing of {num_samples} samples at global_batch_size={global_batch_size}; "
            f"use drop_last: false or global_batch_size <= {num_samples}"
        )
    return num_samples // global_batch_size if drop_last else -(-num_samples // global_batch_size)


def total_steps(config: RunConfig, num_batches_per_epoch: int) -> int:
    """Updates that the whole run makes if none is skipped."""
    if config.max_steps is not None:
        return config.max_steps
    assert config.max_epochs is not None
    return config.max_epochs * num_batches_per_epoch


def warmup_steps(config: RunConfig, num_batches_per_epoch: int) -> int:
    """Steps of the linear warm-up; one_cycle without one warms up over the first 30 %, OneCycleLR's default."""
    schedule = config.schedule
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    if schedule.warmup_epochs is not None:
        return round(schedule.warmup_epochs * num_batches_per_epoch)
    return round(0.3 * total_steps(config, num_batches_per_epoch)) if schedule.name == "one_cycle" else 0


def peak_lr(config: RunConfig) -> float:
    """optim.lr, times what optim.lr_scaling says: linear as in Goyal et al., https://arxiv.org/abs/1706.02677; sqrt as
    Krizhevsky, https://arxiv.org/abs/1404.5997."""
    if config.optim.lr_scaling == "none":
        return config.optim.lr
    assert config.global_batch_size is not None
    ratio = config.global_batch_size / config.optim.lr_base_batch
    return config.optim.lr * (ratio if config.optim.lr_scaling == "linear" else math.sqrt(ratio))


def describe_lr(config: RunConfig) -> str:
    """How the peak came about, where it is not the number in the settings; else nothing."""
    if config.optim.lr_scaling == "none":
        return ""
    ratio = f"{config.global_batch_size}/{config.optim.lr_base_batch}"
    factor = ratio if config.optim.lr_scaling == "linear" else f"sqrt({ratio})"
    return f"lr {config.optim.lr:g} x {factor} = {peak_lr(config):.6g}"


def lr_at(step: int, config: RunConfig, num_batches_per_epoch: int) -> float:
    """Learning rate of the update that follows `step` completed ones.

    linear: a straight line down. cosine: Loshchilov & Hutter, https://arxiv.org/abs/1608.03983, without restarts.
    one_cycle: cosine up from lr/25, then cosine down, Smith & Topin, https://arxiv.org/abs/1708.07120. The final value
    is that after the last update.
    """
    schedule, peak = config.schedule, peak_lr(config)
    warmup, total = warmup_steps(config, num_batches_per_epoch), total_steps(config, num_batches_per_epoch)
    final = peak * schedule.final_lr_fraction
    if step < warmup:
        if schedule.name == "one_cycle":
            return _cosine_between(peak / 25, peak, step / warmup)
        if schedule.warmup_start_fraction:
            return peak * (schedule.warmup_start_fraction + (1 - schedule.warmup_start_fraction) * step / warmup)
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if schedule.name in ("cosine", "one_cycle"):
        return _cosine_between(peak, final, progress)
    if schedule.name == "linear":
        return peak + (final - peak) * progress
    if schedule.name == "step":
        every = max(1, round(schedule.step_every_epochs * num_batches_per_epoch))
        return peak * schedule.step_factor ** (step // every)
    return peak


def lr_plan(config: RunConfig, num_batches_per_epoch: int) -> tuple[tuple[int, float], ...]:
    """(percent, learning rate) at each quarter of the steps; 100 % is after the last update."""
    total = total_steps(config, num_batches_per_epoch)
    return tuple(
        (percent, lr_at(total * percent // 100, config, num_batches_per_epoch)) for percent in (0, 25, 50, 75, 100)
    )


def _cosine_between(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))


def resolve_precision(config: RunConfig, device: str, *, has_amx: bool) -> str:
    """What `mixed_precision: auto` means here: fp16 on CUDA, bf16 on a CPU with AMX, else no; always no in float64."""
    if config.dtype == "float64":
        return "no"
    if config.mixed_precision != "auto":
        return config.mixed_precision
    if device == "cuda":
        return "fp16"
    return "bf16" if device == "cpu" and has_amx else "no"


def why_precision(config: RunConfig, device: str, *, has_amx: bool) -> str:
    """The reason for what resolve_precision() says; empty where it is the user's word."""
    if config.mixed_precision != "auto":
        return ""
    if config.dtype == "float64":
        return "auto: dtype is float64"
    if device == "cpu":
        return f"auto: this CPU has {'AMX' if has_amx else 'no AMX'}"
    return f"auto: on {device}"


def with_reason(value: str, why: str) -> str:
    """`bf16 (auto: this CPU has AMX)`."""
    return f"{value} ({why})" if why else value


CPU_WORKERS, MAX_WORKERS = 2, 8
WORKER_SHM_BYTES = 64 * 2**20
"""Shared memory that a loader worker should have for its batches; what they really take, the ranks check."""


def resolve_workers(
    config: RunConfig, device: str, cores: int, local_world_size: int, shm_bytes: int | None
) -> tuple[int, str]:
    """Loader workers of a rank that streams, and why; the reason is empty where it is the user's word.

    Beside a GPU the cores of the host have nothing else to do; on a CPU they compute.
    """
    if config.data.num_workers != "auto":
        return config.data.num_workers, ""
    if device != "cuda":
        return CPU_WORKERS, f"auto: the cores compute on {device}"
    room = MAX_WORKERS if shm_bytes is None else shm_bytes // WORKER_SHM_BYTES // local_world_size
    most = max(CPU_WORKERS, min(MAX_WORKERS, room))
    share = f"{counted(cores, 'core')} / {counted(local_world_size, 'process')} - 1, from 1 to {most}"
    because = "" if most == MAX_WORKERS else ", which shared memory has room for"
    return max(1, min(most, cores // local_world_size - 1)), f"auto: {share}{because}"
