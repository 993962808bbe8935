"""Every knob: its type, range, unit and default. Strict and frozen: nothing is guessed, unknown keys are errors.

Only what the user may choose stands here; what follows from it is computed in derive.py and stored nowhere.
"""

import difflib
import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from configs.known_data import IMAGE_FOLDER, KNOWN_DATA

FP32_SPELLINGS = ("no", "off", "false", "fp32", "none")
BUILT_IN_MODELS = ("mlp", "mnist_cnn", "small_resnet")

# Two spellings of one thing: exactly one of the first, at most one of the second.
ONE_OF = (("max_epochs", "max_steps"), ("global_batch_size", "per_device_batch_size"))
OF_IMAGE_FOLDERS = ("val_fraction", "image_size", "resize_size", "channels", "on_bad_image", "max_bad_images")
"""Settings of `data` that have no meaning for other data sets."""
AT_MOST_ONE_OF = (("schedule.warmup_steps", "schedule.warmup_epochs"),)


def _whole(value: Any) -> Any:
    """YAML reads `1e3` as a float; a float that is a whole number is accepted where an integer is wanted."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError(
            f"{value} is not a power of two; use {1 << (value.bit_length() - 1)} or {1 << value.bit_length()}"
        )
    return value


def _precision(value: Any) -> Any:
    spelling = "no" if value is None or value is False else str(value).lower()
    return "no" if spelling in FP32_SPELLINGS else spelling


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the choice nearest to `word`, or nothing where none is near."""
    near = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""


def _known_or_own(name: str, known: Iterable[str], also: str) -> str:
    """A built-in name, or `module:callable` of the user's own."""
    module, _, attribute = name.partition(":")
    if name in known or (module and attribute):
        return name
    raise ValueError(f"'{name}' is unknown (expected one of {', '.join(known)}, {also}){did_you_mean(name, known)}")


def _data_name(name: str) -> str:
    return _known_or_own(name, (*KNOWN_DATA, IMAGE_FOLDER), "or module:callable")


def _model_name(name: str) -> str:
    if name.startswith("torchvision/"):
        return name
    return _known_or_own(name, BUILT_IN_MODELS, "torchvision/NAME or module:callable")


Count = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
CountOrZero = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
OpenFraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
PerChannel = Annotated[tuple[Finite, ...], Field(min_length=1), BeforeValidator(_tuple)]
Range = Annotated[tuple[Finite, Finite], BeforeValidator(_tuple)]
Precision = Annotated[Literal["auto", "no", "fp16", "bf16"], BeforeValidator(_precision)]
Auto = Literal["auto"]


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_default=True)


class AugmentConfig(Section):
    """Random changes of training images, keyed by (seed, epoch, sample): the same on any number of processes."""

    shift: CountOrZero = Field(
        default=0, description="move each image by up to this many pixels in x and y, filled with zeros"
    )
    flip: bool = Field(default=False, description="mirror left-right with probability 1/2")
    cutout: CountOrZero = Field(default=0, description="side in pixels of one square set to the mean; 0 = none")
    crop_scale: Range | None = Field(
        default=(0.08, 1.0),
        description="with data.image_size: share of an image's area that a random crop keeps; null: the middle, as in "
        "evaluation",
    )
    crop_ratio: Range = Field(
        default=(3 / 4, 4 / 3),
        description="with data.image_size: width to height of a random crop, which is then a square",
    )

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for name, most in (("crop_scale", 1.0), ("crop_ratio", math.inf)):
            low, high = getattr(self, name) or (1.0, 1.0)
            if not 0 < low <= high <= most:
                limit = "" if most == math.inf else f" up to {most:g}"
                raise ValueError(f"{name}: [{low:g}, {high:g}] is not a range of positive numbers{limit}")
        return self


class DataConfig(Section):
    """The data set and where its batches are made."""

    name: Annotated[str, AfterValidator(_data_name)] = Field(
        default="mnist",
        description="mnist, fashion_mnist, cifar10, cifar100, imagefolder, or module:callable (train: bool) -> Dataset",
    )
    root: str = Field(
        default="data",
        description="folder of the data sets, relative to where the command is run; for imagefolder the one that holds "
        "train/ and val/, with a folder of images for each class in both",
    )
    mirror: str | None = Field(
        default=None, description="URL to download the data set's files from, instead of its own site"
    )
    residency: Literal["auto", "device", "stream"] = Field(
        default="auto", description="device: the whole set as one uint8 tensor on the device; stream: through workers"
    )
    num_workers: CountOrZero | Auto = Field(
        default="auto",
        description="loader processes per rank when streaming; auto: 2 on a CPU, whose cores compute; "
        "on GPUs cores / local ranks - 1, from 1 to 8",
    )
    num_classes: Count | None = Field(
        default=None, description="classes of a module:callable data set; known for the built-in ones"
    )
    val_fraction: OpenFraction | None = Field(
        default=None,
        description="imagefolder: data.root holds the classes itself, and this share of each is kept for evaluation, "
        "chosen by a hash of the file's path",
    )
    image_size: Count | None = Field(
        default=None,
        description="imagefolder: side in pixels of the square that an image becomes; null: images stay as they are",
    )
    resize_size: Count | None = Field(
        default=None,
        description="imagefolder: pixels of the shorter side, of which evaluation sees the middle; default: 8/7 of "
        "image_size",
    )
    channels: Literal[1, 3] = Field(default=3, description="imagefolder: 3 reads images as RGB, 1 as grey")
    on_bad_image: Literal["fail", "skip"] = Field(
        default="fail",
        description="imagefolder, when an image cannot be decoded: fail, naming it; or take the next one that can be, "
        "and list it in bad_images.txt",
    )
    max_bad_images: CountOrZero = Field(
        default=100, description="on_bad_image: skip gives up when it is more than these"
    )
    mean: PerChannel | None = Field(
        default=None, description="per channel, of pixels in [0, 1]; default: the data set's own"
    )
    std: PerChannel | None = Field(
        default=None, description="per channel, of pixels in [0, 1]; default: the data set's own"
    )
    augment: AugmentConfig = AugmentConfig()

    @model_validator(mode="after")
    def _for_image_folders(self) -> Self:
        given = [name for name in OF_IMAGE_FOLDERS if getattr(self, name) != type(self).model_fields[name].default]
        if given and self.name != IMAGE_FOLDER:
            raise ValueError(f"{', '.join(given)}: only for name: {IMAGE_FOLDER}, and name is {self.name}")
        if self.resize_size is not None and self.resize_size < (self.image_size or math.inf):
            raise ValueError(f"resize_size is {self.resize_size} and needs an image_size that is no larger")
        crops = self.augment.crop_scale, self.augment.crop_ratio
        if self.image_size is None and crops != (AugmentConfig().crop_scale, AugmentConfig().crop_ratio):
            raise ValueError("augment.crop_scale and augment.crop_ratio need image_size")
        if self.image_size is not None and self.residency == "device" and self.augment.crop_scale is not None:
            raise ValueError(
                "residency: device would keep one random crop of each image for the whole run; use residency: stream, "
                "or augment.crop_scale: null"
            )
        if self.name == IMAGE_FOLDER and self.mean is not None and len(self.mean) not in (1, self.channels):
            raise ValueError(f"mean has {len(self.mean)} channels and the images have channels: {self.channels}")
        return self

    @model_validator(mode="after")
    def _mean_and_std(self) -> Self:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std are given together or not at all")
        if self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels and std {len(self.std)}")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std must be positive, got {list(self.std)}")
        return self


class ModelConfig(Section):
    """The network."""

    name: Annotated[str, AfterValidator(_model_name)] = Field(
        default="mnist_cnn",
        description="mlp, mnist_cnn, small_resnet, torchvision/NAME, or module:callable (num_classes: int, **args)",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the network's constructor")


class LossConfig(Section):
    """The loss, a mean over the samples of the global batch."""

    name: Literal["cross_entropy", "nll"] = Field(default="cross_entropy", description="nll takes log-probabilities")
    label_smoothing: Fraction = Field(
        default=0.0, description="share of the target spread evenly over all classes; in training only"
    )


class OptimConfig(Section):
    """The optimizer."""

    name: Literal["sgd", "adam", "adamw"] = Field(default="sgd", description="sgd, adam or adamw")
    lr: NonNegative = Field(default=0.1, description="peak learning rate; never scaled behind your back")
    momentum: Fraction = Field(default=0.0, description="sgd only")
    nesterov: bool = Field(default=False, description="sgd only, needs momentum > 0")
    betas: PerChannel = Field(default=(0.9, 0.999), description="adam and adamw only")
    eps: Positive = Field(default=1e-8, description="adam and adamw only")
    weight_decay: NonNegative = Field(default=0.0, description="L2 penalty with sgd and adam, decoupled with adamw")
    decay_norm_and_bias: bool = Field(default=False, description="apply weight_decay to norms and biases too")
    max_grad_norm: Positive | None = Field(default=None, description="clip the norm of the whole gradient to this")
    fused: bool | None = Field(default=None, description="one kernel per update; default: where torch has it")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.nesterov and (self.name != "sgd" or self.momentum == 0):
            raise ValueError("nesterov needs name: sgd and momentum > 0")
        if self.name != "sgd" and self.momentum:
            raise ValueError(f"momentum is for sgd; {self.name} takes betas")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are two numbers in [0, 1), got {list(self.betas)}")
        return self


class ScheduleConfig(Section):
    """The learning rate as a pure function of the step (derive.lr_at)."""

    name: Literal["constant", "cosine", "step", "one_cycle"] = Field(
        default="constant", description="constant, cosine, step or one_cycle, each after the warm-up"
    )
    warmup_steps: CountOrZero | None = Field(default=None, description="linear warm-up, in steps; or warmup_epochs")
    warmup_epochs: NonNegative | None = Field(default=None, description="linear warm-up, in epochs; or warmup_steps")
    final_lr_fraction: Fraction = Field(default=0.0, description="cosine and one_cycle end at this fraction of lr")
    step_every_epochs: Positive = Field(default=30.0, description="step: decay after this many epochs")
    step_factor: Fraction = Field(default=0.1, description="step: multiply by this")

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            raise ValueError("warmup_steps and warmup_epochs are two spellings of one thing; give one")
        return self


class EmaConfig(Section):
    """An exponential moving average of the weights, evaluated beside the raw ones."""

    half_life_samples: Positive | None = Field(
        default=None,
        description="samples after which old weights count half, at most a tenth of those seen; default: no EMA",
    )


class EvalConfig(Section):
    """Evaluation: each sample of the test split exactly once. It always runs at the end too."""

    every_epochs: Count | None = Field(
        default=1, description="evaluate after this many epochs; null: only at the end (or every_steps)"
    )
    every_steps: Count | None = Field(default=None, description="evaluate after this many updates too")
    mode: Literal["sharded", "rank0"] = Field(
        default="sharded", description="the same result to the last digit either way"
    )
    batch_size: Count = Field(default=500, description="samples per forward pass, a fixed cut of the test split")


class CheckpointConfig(Section):
    """Checkpoints: complete or absent, verified by hash. One is always written at the end and when stopped."""

    every_steps: Count | None = Field(default=None, description="save after this many updates")
    every_minutes: Positive | None = Field(default=None, description="save when the last one is this old")
    every_epochs: Count | None = Field(default=1, description="save after this many epochs")
    keep: Annotated[int, Field(ge=2), BeforeValidator(_whole)] = Field(
        default=2, description="newest ones to keep, besides the best"
    )


class LogConfig(Section):
    """What is written while training."""

    every_steps: Count = Field(
        default=50, description="a point in TensorBoard and metrics.jsonl, the mean since the last point"
    )
    sample_ids: bool = Field(
        default=False, description="write which samples each batch trains on, to attempts/K/samples-rankR.jsonl"
    )
    console_every_s: NonNegative = Field(
        default=5.0, description="seconds between console lines; a terminal shows a bar instead"
    )


class GuardConfig(Section):
    """Limits of what `nonfinite` may do, and what counts as a spike of the loss."""

    max_skipped: Count = Field(default=100, description="nonfinite: skip gives up after this many dropped updates")
    max_skipped_fraction: Fraction = Field(
        default=0.01, description="nonfinite: skip gives up when more than this share was dropped; one always may be"
    )
    max_rollbacks: Count = Field(default=3, description="nonfinite: rollback gives up after this many")
    spike_factor: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="a loss above this many times the median of the window is treated like one that is not finite",
    )
    spike_window_steps: Annotated[int, Field(ge=10), BeforeValidator(_whole)] = Field(
        default=100, description="updates whose losses make the median; before that many nothing is a spike"
    )


class EarlyStoppingConfig(Section):
    """End the run, as finished, when its evaluations no longer get better."""

    patience: Count | None = Field(
        default=None, description="evaluations in a row without a better one after which the run ends; null: never"
    )
    metric: Literal["eval/top1", "eval/loss"] = Field(
        default="eval/top1", description="judged on the EMA where there is one"
    )
    min_delta: NonNegative = Field(default=0.0, description="better by no more than this is not better")


FaultKind = Literal[
    "sigkill",
    "sigkill_in_save",
    "exit",
    "raise",
    "hang",
    "slow",
    "nan",
    "oom",
    "sigterm",
    "sigstop",
    "corrupt_checkpoint",
]


class FaultConfig(Section):
    """One fault to inject, for tests and for `python -m launch verify faults`."""

    kind: FaultKind
    rank: CountOrZero = 0
    step: CountOrZero = 0
    attempt: Count | None = 1
    seconds: Positive = 3.0


class ExpectConfig(Section):
    """What the finished run must reach; otherwise it fails with exit code 1."""

    max_train_loss: Positive | None = Field(default=None, description="the last logged train/loss must be below")
    min_top1: Fraction | None = Field(default=None, description="the final top-1, a fraction, must be at least")


class LaunchConfig(Section):
    """How the processes are run and ended."""

    grace_s: Positive = Field(default=30.0, description="seconds that a stopped run has to finish its step and save")
    collective_timeout_s: Positive = Field(
        default=600.0, description="seconds that a rank waits for the others before it fails"
    )
    max_restarts: CountOrZero = Field(
        default=0, description="restart from the newest checkpoint this often by itself when a rank fails"
    )
    restart_wait_s: NonNegative = Field(
        default=1.0, description="before the first restart; doubles with each, up to a minute"
    )
    hang_timeout_s: Positive | None = Field(
        default=None, description="seconds after which a step counts as hung; default: 60 or 20 median steps, if longer"
    )
    num_threads: Count | None = Field(
        default=None,
        description="CPU threads per rank; default: cores / virtual_shards, or / local ranks and less loader workers",
    )


class RunConfig(Section):
    """One run."""

    seed: Annotated[int, Field(ge=0, le=2**63 - 1), BeforeValidator(_whole)] = Field(
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
    virtual_shards: Annotated[int, Field(ge=0), BeforeValidator(_whole), AfterValidator(_power_of_two)] = Field(
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
        default=None, description="model.safetensors or a run folder to take weights from; nothing else"
    )
    max_time_s: Positive | None = Field(
        default=None, description="save and stop, to be gone on with, when this start has lasted this long"
    )
    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="when a loss or gradient is not finite: stop; drop the update; or go back to a checkpoint, past it",
    )
    faults: Annotated[tuple[FaultConfig, ...], BeforeValidator(_tuple)] = Field(
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
    def _one_batchnorm(self) -> Self:
        if self.virtual_shards and self.sync_batchnorm:
            raise ValueError("virtual_shards and sync_batchnorm are two ways to one BatchNorm; give one")
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
