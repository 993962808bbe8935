"""The sections of the settings but `data`."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from configs.known_models import is_library_model, is_published
from configs.values import (
    Count,
    CountOrZero,
    Fraction,
    Names,
    NonNegative,
    PerChannel,
    Positive,
    Section,
    model_name,
    weights_name,
    whole,
)


class ModelConfig(Section):
    """The network."""

    name: Annotated[str, AfterValidator(model_name)] = Field(
        default="mnist_cnn",
        description="mlp, mnist_cnn, small_resnet, whitened_cnn, a network of torchvision such as resnet50, timm/NAME, "
        "or module:callable (num_classes: int, **args)",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the network's constructor")
    weights: Annotated[str, Field(min_length=1), BeforeValidator(weights_name)] = Field(
        default="none",
        description="default: the library's pretrained weights, or a name of such (IMAGENET1K_V1); or the path of a "
        ".safetensors, .pth or run folder; what differs in the head begins anew",
    )
    freeze: Names = Field(
        default=(), description="parameters that do not train, by name or module, * and ? allowed: [conv1, layer1]"
    )
    freeze_except: Names = Field(
        default=(), description="parameters that train though freeze names them; without freeze: all others are frozen"
    )
    checkpointing: bool = Field(
        default=False,
        description="gradient checkpointing: compute a block's activations again in the backward pass instead of "
        "keeping them; the same results with less memory, about a third slower",
    )

    @model_validator(mode="after")
    def _weights_of_a_library(self) -> Self:
        if is_published(self.weights) and not is_library_model(self.name):
            raise ValueError(
                f"weights: {self.weights} is for networks of torchvision and timm, and name is {self.name}; give a "
                f"path, such as ./{self.weights}"
            )
        given = [key for key in ("weights", "pretrained") if key in self.args]
        if given and is_library_model(self.name):
            raise ValueError(f"args.{given[0]}: use model.weights, which is fetched once and checked")
        return self


class OptimConfig(Section):
    """The optimizer."""

    name: Literal["sgd", "adam", "adamw", "rmsprop", "lamb", "lion", "muon"] = Field(
        default="sgd",
        description="sgd, adam, adamw, rmsprop; lamb and lion by timm; muon, with adamw for all but inner matrices",
    )
    lr: NonNegative = Field(default=0.1, description="peak learning rate; never scaled behind your back")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none",
        description="linear or sqrt: lr is for a batch of lr_base_batch and grows with global_batch_size, or its root",
    )
    lr_base_batch: Count = Field(default=256, description="lr_scaling: the global batch that lr is for")
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=1.0, description="each block of the network learns at this fraction of the rate of the one after it"
    )
    norm_and_bias_lr: Positive = Field(
        default=1.0, description="norms and biases learn at this multiple of the rate, and decay as much as before"
    )
    momentum: Fraction = Field(default=0.0, description="sgd, rmsprop and muon only")
    nesterov: bool = Field(default=False, description="sgd and muon only, needs momentum > 0")
    betas: PerChannel = Field(
        default=(0.9, 0.999),
        description="adam, adamw, lamb, lion, and muon where it leaves a weight to adamw; rmsprop's alpha: the last",
    )
    eps: Positive = Field(
        default=1e-8, description="adam, adamw, lamb, rmsprop, and muon where it leaves a weight to adamw"
    )
    weight_decay: NonNegative = Field(
        default=0.0, description="L2 penalty with sgd, adam, rmsprop and lamb, decoupled with adamw, lion and muon"
    )
    decay_norm_and_bias: bool = Field(default=False, description="apply weight_decay to norms and biases too")
    max_grad_norm: Positive | None = Field(default=None, description="clip the norm of the whole gradient to this")
    fused: bool | None = Field(default=None, description="one kernel per update; default: where torch has it")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.nesterov and (self.name not in ("sgd", "muon") or self.momentum == 0):
            raise ValueError("nesterov needs name: sgd or muon, and momentum > 0")
        if self.name not in ("sgd", "rmsprop", "muon") and self.momentum:
            raise ValueError(f"momentum is for sgd, rmsprop and muon; {self.name} takes betas")
        if self.name == "muon" and not self.momentum:
            raise ValueError("muon needs momentum, such as 0.95")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are two numbers in [0, 1), got {list(self.betas)}")
        return self


class ScheduleConfig(Section):
    """The learning rate as a pure function of the step (derive.lr_at)."""

    name: Literal["constant", "linear", "cosine", "step", "one_cycle"] = Field(
        default="constant", description="constant, linear, cosine, step or one_cycle, each after the warm-up"
    )
    warmup_steps: CountOrZero | None = Field(default=None, description="linear warm-up, in steps; or warmup_epochs")
    warmup_epochs: NonNegative | None = Field(default=None, description="linear warm-up, in epochs; or warmup_steps")
    warmup_start_fraction: Fraction = Field(
        default=0.0, description="the warm-up begins with this fraction of lr; 0: with the first of its equal steps"
    )
    final_lr_fraction: Fraction = Field(
        default=0.0, description="linear, cosine and one_cycle end at this fraction of lr"
    )
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
    flip: bool = Field(default=False, description="score the mean of the logits of each image and its mirror image")
    shift: CountOrZero = Field(
        default=0,
        description="score half of that and half of the same for the image moved by so many pixels along the diagonal, "
        "both ways; 0: not",
    )


class CheckpointConfig(Section):
    """Checkpoints: complete or absent, verified by hash. One is always written at the end and when stopped."""

    every_steps: Count | None = Field(default=None, description="save after this many updates")
    every_minutes: Positive | None = Field(default=None, description="save when the last one is this old")
    every_epochs: Count | None = Field(default=1, description="save after this many epochs")
    keep: Annotated[int, Field(ge=2), BeforeValidator(whole)] = Field(
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
    spike_window_steps: Annotated[int, Field(ge=10), BeforeValidator(whole)] = Field(
        default=100, description="updates whose losses make the median; before that many nothing is a spike"
    )


class EarlyStoppingConfig(Section):
    """End the run, as finished, when its evaluations no longer get better."""

    patience: Count | None = Field(
        default=None, description="evaluations in a row without a better one after which the run ends; null: never"
    )
    metric: Literal["eval/top1", "eval/loss", "eval/balanced_accuracy"] = Field(
        default="eval/top1",
        description="eval/top1, eval/loss or eval/balanced_accuracy; judged on the EMA where there is one",
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
