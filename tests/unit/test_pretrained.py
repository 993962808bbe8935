"""Weights to start from: every value is looked up in the file that the test wrote."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import ResNet18_Weights, resnet18

from configs.errors import CheckpointError, ConfigError, EnvironmentProblem
from configs.sections import ModelConfig
from trainer.models import build_model
from trainer.pretrained import fetch, fit_channels, load_pretrained, published_stats


def network(config: ModelConfig, num_classes: int = 3, channels: int = 3) -> nn.Module:
    return build_model(config, num_classes, (channels, 32, 32), 0, torch.float32)


@pytest.fixture(scope="module")
def trained() -> dict[str, torch.Tensor]:
    """Those of another initialisation, for 1000 classes."""
    torch.manual_seed(7)
    return {name: tensor.clone() for name, tensor in resnet18().state_dict().items()}


def written(path: Path, tensors: dict[str, Any]) -> ModelConfig:
    torch.save(tensors, path)
    return ModelConfig(name="resnet18", weights=str(path))


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"model": t, "epoch": 3}, lambda t: {"state_dict": t}])
def test_all_but_the_head_is_the_files(tmp_path: Path, trained: dict[str, torch.Tensor], wrap: Any) -> None:
    config = written(tmp_path / "weights.pth", wrap({"module." + name: value for name, value in trained.items()}))
    model, fresh = network(config), network(config).state_dict()
    said = load_pretrained(model, config, 3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, fresh[name] if name in ("fc.weight", "fc.bias") else trained[name])
    assert said == f"weights    {tmp_path}/weights.pth; new for 3 classes: fc.weight, fc.bias"


def test_the_first_values_of_a_new_head_are_the_seeds() -> None:
    assert torch.equal(network(ModelConfig(name="resnet18")).fc.weight, network(ModelConfig(name="resnet18")).fc.weight)


def test_the_same_classes_keep_the_head(tmp_path: Path, trained: dict[str, torch.Tensor]) -> None:
    save_file(trained, tmp_path / "model.safetensors")
    config = ModelConfig(name="torchvision/resnet18", weights=str(tmp_path))  # a run folder
    model = network(config, num_classes=1000)
    assert load_pretrained(model, config, 1000) == f"weights    {tmp_path}"
    assert torch.equal(model.fc.weight, trained["fc.weight"])


@pytest.mark.parametrize("channels", [1, 4])
def test_a_grey_image_gives_what_its_colour_copy_gave(
    tmp_path: Path, trained: dict[str, torch.Tensor], channels: int
) -> None:
    config = written(tmp_path / "w.pth", trained)
    model = network(config, channels=channels)
    assert "fitted to the channels: conv1.weight" in load_pretrained(model, config, 3)
    image = torch.rand(1, 1, 32, 32)
    theirs = nn.functional.conv2d(image.expand(1, 3, 32, 32), trained["conv1.weight"], stride=2, padding=3)
    ours = model.conv1(image.expand(1, channels, 32, 32))
    if channels == 1:
        torch.testing.assert_close(ours, theirs)
    assert model.conv1.weight.shape[1] == channels


def test_more_channels_weigh_as_much_as_three() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
    assert fit_channels(weight, 4).flatten().tolist() == [0.75, 1.5, 2.25, 0.75]
    assert fit_channels(weight, 1).flatten().tolist() == [6.0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t | {"more": torch.ones(1)}, "more: the network has no such tensor"),
        (lambda t: {k: v for k, v in t.items() if k != "bn1.weight"}, "bn1.weight: the weights have no such tensor"),
        (lambda t: t | {"bn1.bias": torch.ones(5)}, "bn1.bias: [5] in the weights, [64] in the network"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, trained: dict[str, torch.Tensor], change: Any, said: str) -> None:
    config = written(tmp_path / "w.pth", change(trained))
    with pytest.raises(CheckpointError, match=r"^model.weights: .* does not fit resnet18: .*; give weights") as error:
        load_pretrained(network(config), config, 3)
    assert said in str(error.value)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    config = written(tmp_path / "w.pth", {"fc.weight": Runs()})
    with pytest.raises(
        CheckpointError, match=r"holds no weights that can be read without running code: .*safetensors$"
    ):
        load_pretrained(network(config), config, 3)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"no weights", b"\x80\x02}q\x00."])
def test_a_file_that_holds_none_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    for name in ("w.pth", "w.safetensors"):
        (tmp_path / name).write_bytes(content)
        config = ModelConfig(name="resnet18", weights=str(tmp_path / name))
        with pytest.raises(CheckpointError, match=r"^model.weights: .*holds no weights"):
            load_pretrained(network(config), config, 3)


def test_published_weights_come_from_the_cache_by_their_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: dict[str, torch.Tensor]
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(trained, folder / Path(ResNet18_Weights.IMAGENET1K_V1.url).name)
    for weights in ("default", "IMAGENET1K_V1"):
        config = ModelConfig(name="resnet18", weights=weights)
        fetch(config)
        model = network(config)
        load_pretrained(model, config, 3)
        assert torch.equal(model.conv1.weight, trained["conv1.weight"])
        assert published_stats(config) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_weights_that_cannot_be_had_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(ResNet18_Weights.IMAGENET1K_V1, "_value_", ResNet18_Weights.IMAGENET1K_V1.value)
    monkeypatch.setattr(
        "torch.hub.download_url_to_file", lambda *_args, **_more: (_ for _ in ()).throw(OSError("no net"))
    )
    with pytest.raises(
        EnvironmentProblem, match=r"^model.weights: default of resnet18 could not be had: OSError: no net"
    ):
        fetch(ModelConfig(name="resnet18", weights="default"))


@pytest.mark.parametrize(
    ("name", "weights", "said"),
    [
        ("resnet18", "IMAGENET1K_V9", "resnet18 has no IMAGENET1K_V9; it has IMAGENET1K_V1 and default"),
        ("mlp", "default", "mlp has no published weights; give the path of a file"),
        ("resnet18", "not/there.pth", "there is no file not/there.pth"),
    ],
)
def test_weights_that_there_are_not(name: str, weights: str, said: str) -> None:
    config = ModelConfig(name=name, weights=weights)
    with pytest.raises(ConfigError, match=said):
        load_pretrained(network(config), config, 3)


def test_none_may_be_written_out() -> None:
    assert ModelConfig(weights="none").weights is None


def test_a_network_of_timms(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    theirs = timm.create_model("resnet18", num_classes=5).state_dict()
    save_file(theirs, tmp_path / "w.safetensors")
    config = ModelConfig(name="timm/resnet18", weights=str(tmp_path / "w.safetensors"))
    model = network(config, channels=1)
    assert "new for 3 classes: fc.weight, fc.bias; fitted to the channels: conv1.weight" in load_pretrained(
        model, config, 3
    )
    torch.testing.assert_close(model.conv1.weight, theirs["conv1.weight"].sum(1, keepdim=True))
    with pytest.raises(ConfigError, match=r"timm has no model 'resnet1o1'; did you mean 'resnet1"):
        network(ModelConfig(name="timm/resnet1o1"))
