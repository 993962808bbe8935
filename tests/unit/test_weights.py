"""Weights from files into networks: what must fit, what begins anew, what is adapted."""

import argparse
import os
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.models  # so slow that the worker imports it only where it is asked for
from safetensors.torch import save_file
from torch import Tensor, nn

from configs.data_section import DataConfig
from configs.errors import CheckpointError, ConfigError
from configs.schema import RunConfig
from trainer.data.datasets import Data
from trainer.data.images import EVALUATION, ImageSplit
from trainer.models import build_model
from trainer.network import other_view
from trainer.weights import adapted_channels, fit_weights, read_weights, take_weights

NAME = "squeezenet1_1"  # 0.7 million parameters but for its head
OTHERS = {"max_epochs": 1, "global_batch_size": 8}


def config(**model: Any) -> RunConfig:
    return RunConfig.model_validate(OTHERS | {"model": {"name": NAME} | model})


def build(num_classes: int, channels: int = 3, seed: int = 0, **model: Any) -> nn.Module:
    return build_model(config(**model).model, num_classes, (channels, 64, 64), seed, torch.float32)


def saved(path: Path, num_classes: int = 7, seed: int = 1) -> dict[str, Tensor]:
    """A file with the weights of a network for `num_classes` and RGB."""
    state = {name: tensor.clone() for name, tensor in build(num_classes, seed=seed).state_dict().items()}
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(OrderedDict(state), path)
    return state


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "pt"])
def test_all_is_taken_where_all_fits(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"net.{suffix}"
    state, model = saved(path), build(7)
    (line,) = take_weights(model, config(weights=str(path)), 7, 3)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert line == f"weights    {path}: {len(state)} of {len(state)} tensors"


def test_a_head_for_other_classes_begins_anew_from_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "net.pth"
    state, model, untouched = saved(path), build(10, seed=3), build(10, seed=3).state_dict()
    (line,) = take_weights(model, config(weights=str(path)), 10, 3)
    head = ["classifier.1.weight", "classifier.1.bias"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, untouched[name] if name in head else state[name]), name
    assert line.endswith("; new, from seed 0: classifier.1.weight, classifier.1.bias (10 classes, it has 7)")


def test_a_file_without_a_head_gives_the_rest(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in saved(tmp_path / "x.pth").items() if not name.startswith("classifier")}
    torch.save(state, tmp_path / "backbone.pth")
    (line,) = take_weights(build(10), config(weights=str(tmp_path / "backbone.pth")), 10, 3)
    assert line.endswith("classifier.1.bias (10 classes, it has no head)")


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 6])
def test_first_convolution_answers_for_other_channels(tmp_path: Path, channels: int) -> None:
    """By hand: of images whose channels are all the same, the answer is that of the RGB network on that grey."""
    path = tmp_path / "net.pth"
    saved(path)
    rgb, model = build(7, seed=1).eval(), build(7, channels).eval()
    (line,) = take_weights(model, config(weights=str(path)), 7, channels)
    grey = torch.rand(2, 1, 64, 64, generator=torch.Generator().manual_seed(2))
    if channels in (1, 3, 6):  # of 2 and 4 only a part of the colours is there twice
        torch.testing.assert_close(model(grey.expand(-1, channels, -1, -1)), rgb(grey.expand(-1, 3, -1, -1)))
    told = {1: "3 channels summed to 1", 3: "tensors"}.get(channels, f"3 channels repeated and scaled to {channels}")
    assert line.endswith(told)


def test_adapted_channels_are_timms() -> None:
    timm = pytest.importorskip("timm.models")
    weight = torch.randn(5, 3, 2, 2)
    for channels in range(1, 9):
        assert torch.equal(adapted_channels(weight, channels), timm.adapt_input_conv(channels, weight.clone()))


def changed(state: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    state = dict(state)
    if how == "missing":
        del state["features.3.squeeze.weight"]
    elif how == "unexpected":
        state["extra.weight"] = torch.zeros(2)
    elif how == "mis-shaped":
        state["features.3.squeeze.weight"] = torch.zeros(16, 64, 3, 3)
    elif how == "first":
        state["features.0.weight"] = torch.zeros(64, 3, 7, 7)
    else:
        state["classifier.1.weight"] = torch.zeros(7, 256, 1, 1)
    return state


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("missing", "features.3.squeeze.weight: the checkpoint has no such tensor"),
        ("unexpected", "extra.weight: the model has no such tensor"),
        ("mis-shaped", r"features.3.squeeze.weight: \[16, 64, 3, 3\] in the checkpoint, \[16, 64, 1, 1\] in the model"),
        ("first", r"features.0.weight: \[64, 3, 7, 7\] in the checkpoint"),
        ("head", r"classifier.1.weight: \[7, 256, 1, 1\] in the checkpoint, \[10, 512, 1, 1\] in the model"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, how: str, told: str) -> None:
    path = tmp_path / "net.pth"
    torch.save(changed(saved(path), how), path)
    model = build(10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"{path} is of another architecture: .*{told}"):
        take_weights(model, config(weights=str(path)), 10, 3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_init_from_must_fit_in_full(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    saved(path)
    everything = RunConfig.model_validate(OTHERS | {"init_from": str(path), "model": {"name": NAME}})
    assert take_weights(build(7), everything, 7, 3) == [f"weights    {path}: all 52 tensors"]
    for num_classes, channels in ((10, 3), (7, 1)):
        with pytest.raises(CheckpointError, match="is of another architecture"):
            take_weights(build(num_classes, channels), everything, num_classes, channels)


class _Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.path,)


@pytest.mark.parametrize("how", ["alone", "beside", "plain pickle"])
def test_a_pickle_that_would_run_code_is_an_error_and_does_not_run(tmp_path: Path, how: str) -> None:
    path, bomb = tmp_path / "net.pth", _Bomb(tmp_path / "ran")
    state = saved(path)
    if how == "plain pickle":
        path.write_bytes(pickle.dumps(bomb))
    else:
        torch.save(bomb if how == "alone" else {"model": state, "more": bomb}, path)
    with pytest.raises(CheckpointError, match=f"model.weights: {path} cannot be read as tensors alone") as told:
        take_weights(build(7), config(weights=str(path)), 7, 3)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", ["bomb", "junk", "another network"])
def test_what_lies_in_the_cache_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    place = tmp_path / "hub" / "checkpoints" / "squeezenet1_1-b8a52dc0.pth"
    place.parent.mkdir(parents=True)
    state = {"weight": torch.zeros(3)}
    place.write_bytes(b"junk")
    if content != "junk":
        torch.save(_Bomb(tmp_path / "ran") if content == "bomb" else state, place)
    with pytest.raises(CheckpointError, match=f"{place} is not the weights of squeezenet1_1: ") as told:
        take_weights(build(7), config(weights="default"), 7, 3)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "ran").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.mark.parametrize("entry", ["model", "state_dict", "model_state_dict"])
def test_checkpoints_of_other_trainers_are_read(tmp_path: Path, entry: str) -> None:
    """torchvision's and timm's reference trainings keep the weights in an entry, with their command line beside it."""
    state = saved(tmp_path / "x.pth")
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({entry: wrapped, "args": argparse.Namespace(lr=0.1), "epoch": 3}, tmp_path / "checkpoint.pth.tar")
    found, _ = read_weights(str(tmp_path / "checkpoint.pth.tar"), "model.weights")
    assert found.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())


def test_averages_are_taken_before_the_weights_themselves(tmp_path: Path) -> None:
    one, two = torch.ones(2), torch.zeros(2)
    averages = {"module.w": one, "n_averaged": torch.tensor(5)}
    torch.save({"model": {"module.w": two}, "model_ema": averages}, tmp_path / "a.pth")
    found, _ = read_weights(str(tmp_path / "a.pth"), "model.weights")
    assert found.keys() == {"w"}
    assert torch.equal(found["w"], one)


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, torch.zeros(2), {}])
def test_what_holds_no_state_dict_is_told(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"holds no state_dict|another architecture"):
        take_weights(build(7), config(weights=str(tmp_path / "a.pth")), 7, 3)


def test_an_absent_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.weights: .*/none.pth does not exist"):
        take_weights(build(7), config(weights=str(tmp_path / "none.pth")), 7, 3)


def test_counters_that_an_old_file_lacks_stay_at_zero() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2))
    found = {n: torch.ones_like(t) for n, t in model.state_dict().items() if not n.endswith("num_batches_tracked")}
    fit = fit_weights(model, found, 2, 3, Path("old.pth"))
    model.load_state_dict(fit.tensors)
    assert int(model.get_buffer("1.num_batches_tracked")) == 0
    assert bool((model.get_buffer("1.running_mean") == 1).all())


@pytest.mark.parametrize("name", ["densenet121", "mnasnet0_5"])
def test_networks_with_a_past_are_read(tmp_path: Path, name: str) -> None:
    """torchvision's DenseNets are published with other names; its MNASNets load nothing without a version."""
    model = build_model(config(name=name).model, 7, (3, 64, 64), 0, torch.float32)
    source = build_model(config(name=name).model, 7, (3, 64, 64), 1, torch.float32).state_dict()
    old = {re.sub(r"(denselayer\d+\.(norm|conv))(\d)", r"\1.\3", name): tensor for name, tensor in source.items()}
    assert ("features.denseblock1.denselayer1.norm.1.weight" in old) is (name == "densenet121")
    torch.save(old, tmp_path / "net.pth")
    take_weights(model, config(name=name, weights=str(tmp_path / "net.pth")), 7, 3)
    assert all(torch.equal(tensor, source[name]) for name, tensor in model.state_dict().items())


def test_auxiliary_heads_of_a_file_are_left_out() -> None:
    source = torchvision.models.googlenet(num_classes=5, aux_logits=True, init_weights=False)
    model = build_model(config(name="googlenet").model, 5, (3, 64, 64), 0, torch.float32)
    fit = fit_weights(model, dict(source.state_dict()), 5, 3, Path("googlenet.pth"))
    assert fit.new == []
    assert isinstance(model.train()(torch.rand(2, 3, 64, 64)), Tensor)


def split(**settings: Any) -> Data:
    images = ImageSplit(None, EVALUATION, DataConfig(name="imagefolder", root="x", **settings), None)  # type: ignore[arg-type]
    return Data(images, images, 10, None, None, None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"image_size": 224, "resize_size": 232}, None),
        ({"image_size": 176, "eval_image_size": 224, "resize_size": 232}, None),
        ({}, None),
        ({"image_size": 224}, "256 pixels, the middle 224 of them, bilinear"),
        ({"image_size": 64, "resize_size": 96, "interpolation": "random"}, "96 pixels, the middle 64 of them, bicubic"),
    ],
)
def test_images_that_are_seen_otherwise_than_the_weights_were_measured_are_told(
    settings: dict[str, Any], said: str | None
) -> None:
    data = {"name": "imagefolder", "root": "x"} | settings
    model = {"name": "resnet50", "weights": "default"}
    config = RunConfig.model_validate({"max_epochs": 1, "global_batch_size": 8, "data": data, "model": model})
    # IMAGENET1K_V2 of torchvision: resized to 232, cropped to 224, bilinear
    theirs = "; the weights were measured at 232 pixels, the middle 224 of them, bilinear"
    found = other_view(config, split(**settings))
    assert found == ([] if said is None else [f"view       evaluation resizes to {said}{theirs}"])
