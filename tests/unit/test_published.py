"""The presets of recipes against what was published, by numbers written down here from the sources they name."""

import math
from pathlib import Path
from typing import Any

import pytest

from configs.loader import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
TORCHVISION = {
    "optim.norm_and_bias_lr": 1.0,
    "schedule.name": "cosine",
    "schedule.final_lr_fraction": 0.0,
    "data.interpolation": "bilinear",
    "data.augment.flip": True,
    "data.augment.mixup": 0.2,
    "data.augment.cutmix": 1.0,
    "loss.name": "cross_entropy",
}
PUBLISHED: dict[str, dict[str, Any]] = {
    # https://pytorch.org/blog/how-to-train-state-of-the-art-models-using-torchvision-latest-primitives
    "resnet50_v2": TORCHVISION
    | {
        "max_epochs": 600,
        "global_batch_size": 128 * 8,
        "optim.name": "sgd",
        "optim.lr": 0.5,
        "optim.momentum": 0.9,
        "optim.nesterov": False,
        "optim.weight_decay": 2e-5,
        "optim.decay_norm_and_bias": False,
        "optim.max_grad_norm": None,
        "schedule.warmup_epochs": 5,
        "schedule.warmup_start_fraction": 0.01,
        "loss.label_smoothing": 0.1,
        "data.image_size": 176,
        "data.eval_image_size": 224,
        "data.resize_size": 232,
        "data.augment.policy": "trivialaugment",
        "data.augment.erasing": 0.1,
        "data.augment.repeats": 4,
    },
    # https://github.com/pytorch/vision/tree/main/references/classification#vit_b_16
    "vit_b_16": TORCHVISION
    | {
        "max_epochs": 300,
        "global_batch_size": 512 * 8,
        "optim.name": "adamw",
        "optim.lr": 0.003,
        "optim.betas": (0.9, 0.999),
        "optim.eps": 1e-8,
        "optim.weight_decay": 0.3,
        "optim.decay_norm_and_bias": True,
        "optim.max_grad_norm": 1.0,
        "schedule.warmup_epochs": 30,
        "schedule.warmup_start_fraction": 0.033,
        "loss.label_smoothing": 0.11,
        "data.image_size": 224,
        "data.resize_size": 256,
        "data.augment.policy": "randaugment",
        "data.augment.policy_ops": 2,
        "data.augment.policy_magnitude": 9,
        "data.augment.policy_magnitude_std": 0.0,
        "data.augment.policy_probability": 1.0,
        "data.augment.repeats": 3,
    },
}
# https://arxiv.org/abs/2110.00476, table 2; a magnitude of timm's RandAugment is of 10, one of torchvision's of 30.
STRIKES_BACK: dict[str, Any] = {
    "global_batch_size": 2048,
    "data.eval_image_size": 224,
    "data.resize_size": math.floor(224 / 0.95),
    "data.interpolation": "bicubic",
    "data.augment.flip": True,
    "data.augment.cutmix": 1.0,
    "data.augment.erasing": 0.0,
    "data.augment.policy": "randaugment",
    "data.augment.policy_magnitude_std": 0.5 * 3,
    "model.name": "timm/resnet50",
    "loss.name": "bce",
    "optim.name": "lamb",
    "optim.decay_norm_and_bias": False,
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 5,
}
OWN = [
    "max_epochs",
    "data.image_size",
    "optim.lr",
    "optim.weight_decay",
    "loss.label_smoothing",
    "model.args.drop_path_rate",
    "data.augment.repeats",
    "data.augment.mixup",
    "data.augment.policy_magnitude",
]
A1 = (600, 224, 0.005, 0.01, 0.1, 0.05, 3, 0.2, 7 * 3)
A2 = (300, 224, 0.005, 0.02, 0.0, 0.05, 3, 0.1, 7 * 3)
A3 = (100, 160, 0.008, 0.02, 0.0, 0.0, 1, 0.1, 6 * 3)
for name, values in (("a1", A1), ("a2", A2), ("a3", A3)):
    PUBLISHED[f"resnet50_{name}"] = STRIKES_BACK | dict(zip(OWN, values, strict=True))


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_numbers(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml", ()).config
    assert {key: value_of(config, key) for key in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("name", ["resnet50_a1", "resnet50_a2", "resnet50_a3"])
def test_the_first_rate_is_that_of_the_scripts(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml", ()).config
    assert config.schedule.warmup_start_fraction * config.optim.lr == pytest.approx(0.0001)


@pytest.mark.parametrize(("name", "batch", "epochs"), [("resnet50_v2", 1024, 600), ("vit_b_16", 4096, 300)])
def test_the_average_forgets_as_fast_as_torchvisions(name: str, batch: int, epochs: int) -> None:
    # Its train.py: alpha = 1 - decay, times (GPUs x batch x steps between averages / epochs), every 32 steps.
    share = (1 - 0.99998) * batch * 32 / epochs
    half_life = 32 * batch * math.log(0.5) / math.log(1 - share)
    found = load_config(CONFIGS / f"{name}.yaml", ()).config.ema.half_life_samples
    assert found == pytest.approx(half_life, rel=0.005)


# https://github.com/KellerJordan/cifar10-airbench at 32cb985: hyp of airbench94.py and airbench96.py.
@pytest.mark.parametrize(
    ("name", "lr", "decay", "shift", "cutout"), [("cifar10_94", 11.5, 0.0153, 2, 0), ("cifar10_96", 9.0, 0.012, 4, 12)]
)
def test_the_presets_for_cifar_have_the_numbers_of_airbench(
    name: str, lr: float, decay: float, shift: int, cutout: int
) -> None:
    config = load_config(CONFIGS / f"{name}.yaml", ()).config
    momentum = 0.85
    assert (config.optim.momentum, config.optim.nesterov) == (momentum, True)
    assert config.optim.lr == pytest.approx(lr / (1 + 1 / (1 - momentum)), rel=1e-3)
    assert config.optim.weight_decay == pytest.approx(decay / lr, rel=3e-3)
    assert (config.optim.norm_and_bias_lr, config.loss.label_smoothing, config.global_batch_size) == (64, 0.2, 1024)
    assert (config.data.augment.shift, config.data.augment.cutout) == (shift, cutout)
    assert (config.data.augment.flip, config.data.augment.shift_padding) == ("alternating", "reflect")
