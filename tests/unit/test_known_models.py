"""Names of networks of libraries, and what is asked of each."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.models  # so slow that the worker imports it only where it is asked for
from pydantic import ValidationError
from torch import Tensor, nn

from configs.errors import ConfigError
from configs.known_models import TORCHVISION_MODELS, is_published
from configs.schema import RunConfig
from configs.sections import ModelConfig
from launch import preflight
from trainer import from_torchvision
from trainer.models import build_model
from trainer.network import _for_channels
from trainer.published import fault_of, find_published


def config(name: str, **model: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": name} | model)


def build(name: str, args: dict[str, Any] | None = None, channels: int = 3, weights: str = "none") -> nn.Module:
    model = config(name, args=args or {}, weights=weights)
    return build_model(model, 10, (channels, 64, 64), 0, torch.float32)


def test_the_names_are_torchvisions() -> None:
    assert sorted(TORCHVISION_MODELS) == torchvision.models.list_models(module=torchvision.models)


def test_published_weights_are_told_from_paths() -> None:
    assert [w for w in ("default", "IMAGENET1K_V2", "a1_in1k") if not is_published(w)] == []
    paths = ("none", "net.pth", "./default", "runs/mnist-001", "/weights", "imagenet-v1", "")
    assert [w for w in paths if is_published(w)] == []


@pytest.mark.parametrize("name", ["resnet18", "torchvision/resnet18"])
def test_a_bare_name_is_torchvisions(name: str) -> None:
    model, theirs = build(name), torchvision.models.resnet18(num_classes=10)
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in theirs.state_dict().items()}


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "vit_b_32", "densenet121"])
def test_torchvisions_networks_take_any_number_of_channels(name: str, channels: int) -> None:
    model = build(name, {"image_size": 64} if name == "vit_b_32" else None, channels)
    assert model(torch.rand(2, channels, 64, 64)).shape == (2, 10)
    assert next(p for p in model.parameters() if p.ndim == 4).shape[1] == channels


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_outputs_are_left_out(name: str) -> None:
    model = build(name).train()
    assert isinstance(model(torch.rand(2, 3, 96, 96)), Tensor)
    with pytest.raises(ConfigError, match=f"aux_logits: true makes {name} answer with a tuple"):
        build(name, {"aux_logits": True})


def test_a_network_that_mixes_colours_its_own_way_takes_three_channels() -> None:
    assert build("googlenet", weights="default").transform_input
    assert not build("googlenet").transform_input
    with pytest.raises(ConfigError, match=r"googlenet changes red.*the images have 1 channels"):
        build("googlenet", channels=1, weights="default")


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("torchvision/resnet5", {}, r"torchvision has no model 'resnet5'; did you mean 'resnet50'"),
        ("torchvision/fcn_resnet50", {}, "torchvision's fcn_resnet50 does not classify images"),
        ("torchvision/quantized_resnet18", {}, None),
        ("resnet18", {"widht": 3}, r"model.args do not fit resnet18: .*'widht'"),
    ],
)
def test_what_torchvision_cannot_build_is_told(name: str, args: dict[str, Any], told: str | None) -> None:
    with pytest.raises(ConfigError, match=told):
        build(name, args)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"name": "mlp", "weights": "default"}, "weights: default is for networks of torchvision and timm"),
        ({"name": "mine:net", "weights": "V1"}, r"give a path, such as \./V1"),
        ({"name": "resnet18", "args": {"weights": "DEFAULT"}}, r"args\.weights: use model\.weights"),
        ({"name": "timm/resnet18", "args": {"pretrained": True}}, r"args\.pretrained: use model\.weights"),
    ],
)
def test_settings_that_make_no_sense_are_told(model: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        ModelConfig.model_validate(model)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"init_from": "a", "model": {"weights": "b.pth"}}, "two sources of weights"),
        ({"sync_batchnorm": True, "model": {"checkpointing": True}}, "does not go with sync_batchnorm"),
    ],
)
def test_settings_that_exclude_each_other_are_told(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        RunConfig.model_validate({"max_epochs": 1, "global_batch_size": 8} | more)


def test_every_published_weight_of_torchvision_is_found_with_its_hash_and_statistics() -> None:
    for name in TORCHVISION_MODELS:
        for weights in torchvision.models.get_model_weights(name):
            found = from_torchvision.published(name, {}, weights.name)
            assert found.url is not None
            assert torch.hub.HASH_REGEX.search(found.url.rpartition("/")[2]), found.url
            assert len(found.mean) == len(found.std) == 3
    default = from_torchvision.published("resnet50", {}, "default")
    assert default.label == "IMAGENET1K_V2 of torchvision"
    assert default.mean == (0.485, 0.456, 0.406)


def test_weights_that_nobody_publishes_are_told() -> None:
    with pytest.raises(ConfigError, match=r"no weights 'IMAGENET' for resnet18; it has IMAGENET1K_V1$"):
        find_published(config("resnet18", weights="IMAGENET"))
    assert find_published(config("resnet18", weights="./x.pth")) is None
    assert find_published(config("mlp")) is None


def test_statistics_for_other_channels() -> None:
    assert _for_channels((0.1, 0.2, 0.6), 1) == pytest.approx((0.3,))
    assert _for_channels((0.1, 0.2, 0.6), 3) == (0.1, 0.2, 0.6)
    assert _for_channels((0.1, 0.2, 0.6), 5) == (0.1, 0.2, 0.6, 0.1, 0.2)


def test_damage_is_told_by_the_name(tmp_path: Path) -> None:
    # SHA-256 of nothing: e3b0c44298fc1c14...
    for name, is_whole in (("a-e3b0c442.pth", True), ("a-e3b0c443.pth", False), ("a.pth", True)):
        (tmp_path / name).touch()
        assert (fault_of(tmp_path / name) is None) is is_whole
    (tmp_path / ("f" * 64)).touch()  # as the hub's cache stores a file, under its hash
    (tmp_path / "model.safetensors").symlink_to("f" * 64)
    assert "its SHA-256 begins with e3b0c44298fc" in (fault_of(tmp_path / "model.safetensors") or "")


def run_config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({"max_epochs": 1, "global_batch_size": 8} | changes)


@pytest.mark.parametrize("key", ["init_from", "model.weights"])
def test_absent_weights_are_told_before_anything_starts(tmp_path: Path, key: str) -> None:
    asked = run_config(**({"init_from": "a.pth"} if key == "init_from" else {"model": {"weights": "a.pth"}}))
    with pytest.raises(ConfigError, match=f"{key}: a.pth does not exist"):
        preflight.check_model(asked, tmp_path, is_new=True)
    preflight.check_model(asked, tmp_path, is_new=False)  # a run that goes on has its own
    (tmp_path / "a.pth").touch()
    preflight.check_model(asked, tmp_path, is_new=True)
    preflight.check_model(run_config(model={"name": "resnet18", "weights": "default"}), tmp_path, is_new=True)


@pytest.fixture
def no_timm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Absent:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "timm":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    yield
    importlib.invalidate_caches()


@pytest.mark.usefixtures("no_timm")
def test_timm_is_missed_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"model\.name: timm/resnet18 needs timm, which is not installed; `pip install timm`"
    for weights in ("none", "default"):
        with pytest.raises(ConfigError, match=told):
            build("timm/resnet18", weights=weights)
    with pytest.raises(ConfigError, match=told):
        find_published(config("timm/resnet18", weights="default"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=told):
        preflight.check_model(run_config(model={"name": "timm/resnet18"}), tmp_path, is_new=True)
