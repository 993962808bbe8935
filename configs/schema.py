"""Every knob: its type, range, unit and default. Strict and frozen: nothing is guessed, unknown keys are errors.

Only what the user may choose stands here; what follows from it is computed in derive.py and stored nowhere.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from configs.data_section import DataConfig
from configs.known_models import NO_WEIGHTS
from configs.loss_section import LossConfig
from configs.sections import (
    CheckpointConfig,
    EarlyStoppingConfig,
    EmaConfig,
    EvalConfig,
    ExpectConfig,
    FaultConfig,
    GuardConfig,
    LaunchConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ScheduleConfig,
)
from configs.values import Auto, Count, Positive, Precision, Section, as_tuple, power_of_two, whole

# Two spellings of one thing: exactly one of the first, at most one of the second.
ONE_OF = (("max_epochs", "max_steps"), ("global_batch_size", "per_device_batch_size"))
AT_MOST_ONE_OF = (("schedule.warmup_steps", "schedule.warmup_epochs"),)


class RunConfig(Section):
    """One run."""

    seed: Annotated[int, Field(ge=0, le=2**63 - 1), BeforeValidator(whole)] = Field(
        default=0, description="of the initial weights, the order of samples and all other randomness"
    )
    max_epochs: Count | None = Field(default=None, description="passes over the training split; or max_steps")
    max_steps: Count | None = Field(default=None, description="completed updates; draws on into further epochs")
    global_batch_size: Count | None = Field(
        default=None, description="samples per update over all ranks and micro-batches"
    )
    per_device_batch_size: Count | None = Field(
        default=None, description="instead of global_batch_size: samples per update and rank"
    )
    max_per_device_batch_size: Count | None = Field(
        default=None, description="a larger share is accumulated in micro-batches"
    )
    drop_last: bool = Field(default=False, description="drop an epoch's last, smaller batch")
    device: Literal["auto", "cuda", "cpu", "mps"] = Field(
        default="auto", description="auto: cuda where a GPU is visible, mps on a Mac, else cpu"
    )
    mixed_precision: Precision = Field(
        default="auto", description="auto: fp16 on CUDA, bf16 on a CPU with AMX, else no"
    )
    dtype: Literal["float32", "float64"] = Field(default="float32", description="of the weights; float64 is for proofs")
    channels_last: bool | Auto = Field(
        default="auto",
        description="memory format of images and weights; auto: where convolutions are computed in fp16 or bf16",
    )
    virtual_shards: Annotated[int, Field(ge=0), BeforeValidator(whole), AfterValidator(power_of_two)] = Field(
        default=0,
        description="cut each global batch into this many parts, a power of two, and sum them in one fixed order: the "
        "same bits on any number of processes that divides it; 0 = off",
    )
    compile: bool | Auto = Field(
        default=False,
        description="torch.compile the network; auto: measure first, which takes a minute or two once a run, and "
        "compile if the planned steps gain more than that",
    )
    steps_per_execution: Count = Field(
        default=1,
        description="updates in one call of a compiled function: nearly twice as fast for long jobs of small networks "
        "on one process; only without buffers, dropout, ema and accumulation",
    )
    sync_batchnorm: bool = Field(default=False, description="BatchNorm over the global batch; GPUs only")
    init_from: str | None = Field(
        default=None,
        description="model.safetensors or a run folder to take weights from, which must fit in full; nothing else",
    )
    max_time_s: Positive | None = Field(
        default=None, description="save and stop, to be gone on with, when this start has lasted this long"
    )
    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="when a loss or gradient is not finite: stop; drop the update; or go back to a checkpoint, past it",
    )
    faults: Annotated[tuple[FaultConfig, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="faults to inject, {kind, rank, step, attempt, seconds}; see docs/faults.md"
    )
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    ema: EmaConfig = EmaConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    guard: GuardConfig = GuardConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    expect: ExpectConfig = ExpectConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _exactly_one_of(self) -> Self:
        for first, second in ONE_OF:
            given = [name for name in (first, second) if getattr(self, name) is not None]
            if len(given) == 2:
                raise ValueError(f"{first} and {second} are two spellings of one thing; give one")
            if not given:
                raise ValueError(f"give {first} or {second}")
        return self

    @model_validator(mode="after")
    def _batch_to_scale_by(self) -> Self:
        if self.optim.lr_scaling != "none" and self.global_batch_size is None:
            raise ValueError("optim.lr_scaling needs global_batch_size, which the number of processes does not change")
        return self

    @model_validator(mode="after")
    def _shards_of_one_batch(self) -> Self:
        if self.virtual_shards and self.global_batch_size is None:
            raise ValueError(
                "virtual_shards needs global_batch_size, which the number of processes does not change; give that "
                "instead of per_device_batch_size"
            )
        if self.virtual_shards and self.compile == "auto":
            raise ValueError("virtual_shards with compile: auto would compile by a clock; use compile: true or false")
        return self

    @model_validator(mode="after")
    def _one_batchnorm(self) -> Self:
        if self.virtual_shards and self.sync_batchnorm:
            raise ValueError("virtual_shards and sync_batchnorm are two ways to one BatchNorm; give one")
        return self

    @model_validator(mode="after")
    def _one_source_of_weights(self) -> Self:
        if self.init_from is not None and self.model.weights != NO_WEIGHTS:
            raise ValueError("init_from and model.weights are two sources of weights; give one")
        if self.model.checkpointing and self.sync_batchnorm:
            raise ValueError(
                "model.checkpointing does not go with sync_batchnorm, whose ranks would exchange statistics in the "
                "backward pass too; give one"
            )
        return self

    @model_validator(mode="after")
    def _whole_pairs(self) -> Self:
        unit, most = self.data.augment.unit, self.max_per_device_batch_size
        if most is not None and most < unit:
            raise ValueError(f"max_per_device_batch_size: {most} would part images that are mixed; use {unit} or more")
        return self

    @model_validator(mode="after")
    def _one_precision(self) -> Self:
        if self.dtype == "float64" and self.mixed_precision not in ("auto", "no"):
            raise ValueError(f"dtype: float64 goes with mixed_precision: no, not {self.mixed_precision}")
        return self


def _knobs(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _knobs(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, section


KNOBS = dict(_knobs(RunConfig, ""))
"""Every knob's dotted name, such as `optim.lr`, and the class of the section that it stands in."""

SECTIONS = {".".join(parts[:i]) for parts in (key.split(".") for key in KNOBS) for i in range(1, len(parts))}
"""The sections' dotted names, such as `data.augment`."""

# What may differ on resume without changing a sample, a weight or a metric; everything else needs --allow-changes.
FREE_ON_RESUME = (
    "device",
    "data.root",
    "data.mirror",
    "data.residency",
    "data.num_workers",
    "data.on_bad_image",
    "data.max_bad_images",
    "model.checkpointing",
    "eval.mode",
    "max_time_s",
    "nonfinite",
    "guard",
    "faults",
    "checkpoint",
    "log",
    "launch",
    "expect",
)
