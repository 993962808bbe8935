"""Training images of several sizes."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.models  # imported late by the network: here before a test looks at the environment
from torch import Tensor, nn

from configs.data_section import DataConfig
from configs.errors import ConfigError
from configs.image_sizes import at_largest_size, progressive_size, training_sizes
from configs.sections import ModelConfig
from tests import splitmix
from tests.folders import noisy
from trainer.data.datasets import load_data
from trainer.data.sizes import size_at
from trainer.flops import Flops
from trainer.models import build_model
from trainer.other_sizes import check_sizes, describe_sizes
from trainer.speed import Speed

SIZE = 11


def folder(**more: Any) -> DataConfig:
    return DataConfig.model_validate({"name": "imagefolder", "image_size": 192} | more)


def growing(start: int, end: int, first: int, last: int) -> DataConfig:
    return folder(image_size=end, progressive={"start_size": start, "from_epoch": first, "until_epoch": last})


@pytest.mark.parametrize(
    ("start", "end", "first", "last"),
    [(160, 192, 11, 13), (128, 224, 0, 16), (160, 224, 5, 70), (64, 224, 3, 4), (100, 130, 0, 9)],
)
def test_images_grow_as_ffcvs_do(start: int, end: int, first: int, last: int) -> None:
    """get_resolution() of ffcv-imagenet's train_imagenet.py; but no size leaves the two that were given."""
    for epoch in range(last + 5):
        (between,) = np.interp([epoch], [first, last], [start, end])
        theirs = start if epoch <= first else end if epoch >= last else int(np.round(between / 32)) * 32
        assert progressive_size(growing(start, end, first, last), epoch) == min(max(theirs, start), end)


def test_the_size_of_a_growing_image_is_that_of_its_epoch() -> None:
    config = growing(160, 192, 11, 13)  # the recipe of 16 epochs that is published for ResNet-50
    sizes = [size_at(config, 5, epoch, 7) for epoch in range(16)]
    assert sizes == [160] * 12 + [192] * 4
    assert training_sizes(config) == (160, 192)
    assert training_sizes(growing(128, 224, 0, 16)) == (128, 160, 192, 224)


def test_one_of_several_sizes_goes_by_seed_epoch_and_batch() -> None:
    config = folder(image_sizes=[192, 128, 160, 160])
    for seed, epoch, batch in ((0, 0, 0), (3, 1, 9), (3, 2, 9)):
        expected = (192, 128, 160, 160)[splitmix.key(seed, epoch, SIZE, batch) % 4]
        assert size_at(config, seed, epoch, batch) == expected
    counts = Counter(size_at(config, 0, 0, batch) for batch in range(4000))
    assert counts.keys() == {128, 160, 192}
    assert abs(counts[160] - 2000) < 160  # five standard deviations
    assert training_sizes(config) == (128, 160, 192)


def test_of_one_size_nothing_is_said_or_drawn() -> None:
    assert size_at(folder(), 0, 0, 0) is None
    assert training_sizes(folder()) == ()
    assert list(describe_sizes(folder())) == []


def test_what_has_to_fit_in_memory_is_the_largest() -> None:
    for config in (folder(image_sizes=[128, 224]), growing(128, 224, 0, 4)):
        largest = at_largest_size(config)
        assert (largest.image_size, training_sizes(largest)) == (224, ())
        assert largest.eval_image_size == config.image_size
        DataConfig.model_validate(largest.model_dump())


def test_a_sample_has_the_size_that_is_asked_for(tmp_path: Path) -> None:
    root = noisy(tmp_path / "images", train__a=3, train__b=3, val__a=1)
    crop = {"augment": {"crop_scale": None}}
    for more in ({}, crop, crop | {"resize_size": 20, "eval_image_size": 16}):
        data: Any = load_data(folder(root=str(root), image_size=16, **more))
        assert data.train.sample(3, 0, 1)[0].shape == (3, 16, 16)
        assert data.train.sample(3, 0, 1, 24)[0].shape == (3, 24, 24)


def test_the_screen_says_when_images_grow() -> None:
    assert list(describe_sizes(growing(128, 192, 2, 6))) == [
        "sizes      128 from epoch 0, 160 from epoch 4, 192 from epoch 5; evaluation 192"
    ]
    assert list(describe_sizes(folder(image_sizes=[160, 128], eval_image_size=224))) == [
        "sizes      128, 160 pixels, drawn for each batch; evaluation 224"
    ]


def test_no_flops_are_told_of_several_sizes() -> None:
    speed = Speed(Flops(2000, 6000), 1, 989.4, "NVIDIA H100 80GB HBM3", "bf16", (128, 160, 192))
    assert speed.metrics(1e9) == {}
    assert speed.facts(1e9)["tflops"] is None
    assert speed.facts(1e9)["flops_per_sample"] == 6000
    assert speed.notes() == [
        "no TFLOP/s: training images are of 128 to 192 pixels, and FLOPs are counted for data.image_size"
    ]


class _FromValues(nn.Module):
    """Cannot be run without data."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :2] if images.sum().item() == 0 else images


def checked(model: nn.Module, side: int, **more: Any) -> None:
    check_sizes(model, folder(image_size=side, **more), (3, side, side), torch.float32)


def test_a_network_of_one_size_is_refused_before_it_is_trained() -> None:
    args = {"image_size": 32, "patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8}
    model = torchvision.models.VisionTransformer(num_classes=4, **args)  # type: ignore[arg-type]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checked(model, 32)
    checked(model, 32, eval_image_size=32)
    with pytest.raises(ConfigError, match=r"takes images of data.image_size=32 pixels and not of 40, which evalu"):
        checked(model, 32, eval_image_size=40)
    with pytest.raises(ConfigError, match=r"not of 24, which training would give it \(AssertionError: Wrong image hei"):
        checked(model, 32, image_sizes=[24, 32])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training


def test_a_network_of_any_size_is_let_pass_and_one_that_cannot_be_tried_too() -> None:
    resnet = build_model(ModelConfig(name="resnet18"), 4, (3, 64, 64), 0, torch.float32)
    for model in (resnet, _FromValues()):
        checked(model, 64, image_sizes=[32, 96], eval_image_size=80)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"name": "mnist", "image_size": None, "image_sizes": [32]}, "image_sizes: only for name: imagefolder"),
        ({"name": "cifar10", "image_size": None, "interpolation": "bicubic"}, "interpolation: only for name"),
        ({"image_size": None, "image_sizes": [32]}, "image_sizes needs image_size"),
        ({"progressive": {"start_size": 192}}, "start_size is 192 and needs an image_size that is more"),
        ({"progressive": {"start_size": 96}, "image_sizes": [32]}, "two ways to other sizes; give one"),
        ({"progressive": {"from_epoch": 3, "start_size": 96, "until_epoch": 3}}, "until_epoch 3, which is no later"),
        ({"progressive": {"until_epoch": 3}}, "from_epoch and until_epoch need start_size"),
        (
            {"image_sizes": [96], "residency": "device", "augment": {"crop_scale": None}},
            "residency: device holds images of one size, not image_sizes",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        folder(**more)
