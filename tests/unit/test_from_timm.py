"""Networks and weights of timm, where it is installed. Nothing is fetched: the hub's cache is made by hand."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor, nn

from configs.errors import ConfigError, EnvironmentProblem
from configs.schema import RunConfig
from configs.sections import ModelConfig
from trainer.models import build_model
from trainer.published import Published, find_published, prepare_weights
from trainer.weights import take_weights

timm = pytest.importorskip("timm")
NAME = "mobilenetv3_small_050"  # 1.6 million parameters


def config(name: str = NAME, **model: Any) -> RunConfig:
    settings = {"max_epochs": 1, "global_batch_size": 8, "model": {"name": f"timm/{name}"} | model}
    return RunConfig.model_validate(settings)


def build(num_classes: int, channels: int = 3, **model: Any) -> nn.Module:
    return build_model(config(**model).model, num_classes, (channels, 64, 64), 0, torch.float32)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The hub's cache with weights of NAME, and no network: the hub is not asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    torch.manual_seed(1)
    state = timm.create_model(NAME).state_dict()
    put(tmp_path / "hub", f"timm/{NAME}.lamb_in1k", state)
    return dict(state)


def put(hub: Path, repository: str, state: dict[str, Tensor]) -> Path:
    place = hub / f"models--{repository.replace('/', '--')}"
    (place / "blobs").mkdir(parents=True)
    save_file(dict(state), place / "new")
    blob = place / "blobs" / hashlib.sha256((place / "new").read_bytes()).hexdigest()
    (place / "new").rename(blob)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("1234")
    (place / "snapshots" / "1234").mkdir(parents=True)
    (place / "snapshots" / "1234" / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")
    return blob


def find(name: str, weights: str = "default") -> Published:
    found = find_published(ModelConfig(name=f"timm/{name}", weights=weights))
    assert found is not None
    return found


@pytest.mark.parametrize("channels", [1, 3])
def test_pretrained_is_as_timm_loads_it(cached: dict[str, Tensor], channels: int) -> None:
    prepare_weights(config(weights="default").model)
    model = build(10, channels)
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (line,) = take_weights(model, config(weights="default"), 10, channels)
    theirs = timm.create_model(
        NAME, pretrained=True, num_classes=10, in_chans=channels, pretrained_cfg_overlay={"state_dict": dict(cached)}
    )
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], fresh[name] if name.startswith("classifier.") else tensor), name
    assert line.startswith("weights    lamb_in1k of timm, ")
    assert line.endswith("; new, from seed 0: classifier.weight, classifier.bias (10 classes, it has 1,000)")
    assert ("conv_stem.weight: 3 channels summed to 1" in line) is (channels == 1)


def test_same_classes_keep_the_head(cached: dict[str, Tensor]) -> None:
    model = build(1000)
    take_weights(model, config(weights="default"), 1000, 3)
    assert all(torch.equal(tensor, cached[name]) for name, tensor in model.state_dict().items())


def test_a_damaged_file_of_the_cache_is_not_taken(
    cached: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (blob,) = (tmp_path / "hub").glob("*/blobs/*")
    damaged = blob.read_bytes()[:-1] + b"!"
    blob.write_bytes(damaged)
    with pytest.raises(EnvironmentProblem, match="could not be downloaded"):
        prepare_weights(config(weights="default").model)
    told = capsys.readouterr().out
    assert f"is damaged: its SHA-256 begins with {hashlib.sha256(damaged).hexdigest()}" in told
    assert not blob.exists()


def test_what_cannot_be_fetched_is_told_in_one_sentence(cached: dict[str, Tensor]) -> None:
    with pytest.raises(EnvironmentProblem) as told:
        find("resnet18").fetch()
    text = str(told.value)
    assert text.startswith("model.weights: a1_in1k of timm for resnet18 could not be downloaded from the repository")
    assert "timm/resnet18.a1_in1k of the Hugging Face hub" in text
    assert text.endswith("or give the path of a file in model.weights")
    assert "\n" not in text


@pytest.mark.parametrize("there", [1, 0])
def test_the_second_name_is_asked_for_where_there_is_no_safetensors_file(
    cached: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    asked = []

    def download(repository: str, name: str) -> str:
        asked.append((repository, name))
        if len(asked) <= 2 - there:
            raise EntryNotFoundError(f"404 for {name}")
        return __file__

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    if there:
        find("resnet18").fetch()
    else:
        with pytest.raises(EnvironmentProblem, match=r"it has no model.safetensors or pytorch_model.bin"):
            find("resnet18").fetch()
    repository = "timm/resnet18.a1_in1k"
    assert asked == [(repository, "model.safetensors"), (repository, "pytorch_model.bin")]


def test_weights_that_are_not_in_the_cache_are_told_and_not_fetched_by_a_rank(cached: dict[str, Tensor]) -> None:
    with pytest.raises(EnvironmentProblem, match="a1_in1k of timm for resnet18 is not in the cache"):
        take_weights(nn.Identity(), config("resnet18", weights="default"), 10, 3)


def test_facts_and_tags() -> None:
    assert find("resnet18").label == "a1_in1k of timm"
    assert find("resnet18", "tv_in1k").hub == ("timm/resnet18.tv_in1k", ("model.safetensors", "pytorch_model.bin"))
    assert find("resnet18.tv_in1k").name == "resnet18.tv_in1k"
    assert find("vit_base_patch16_224").mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("name", "weights", "told"),
    [
        ("resnet5o", "none", r"timm has no model 'resnet5o'; did you mean 'resnet50"),
        ("resnet50.a1_in1", "none", r"model.name: timm has no weights 'a1_in1' for resnet50; .*did you mean 'a1_in1k'"),
        ("resnet50", "a1_in1", r"model.weights: timm has no weights 'a1_in1' for resnet50; .*did you mean 'a1_in1k'"),
        ("test_resnet_x", "none", r"timm has no model 'test_resnet_x'"),
    ],
)
def test_unknown_names_are_told(name: str, weights: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build(10, name=name) if weights == "none" else find(name, weights)


def test_arguments_are_passed_on() -> None:
    model = build(10, 1, args={"drop_rate": 0.25})
    assert model.drop_rate == 0.25
    assert model(torch.rand(2, 1, 64, 64)).shape == (2, 10)
    with pytest.raises(ConfigError, match=r"model.args do not fit timm/.*'widht'"):
        build(10, args={"widht": 1})


def test_the_view_is_that_of_the_weights() -> None:
    # timm/resnet50.a1_in1k on the hub: crop_pct 0.95 of 224, bicubic
    assert find("resnet50", "a1_in1k").view == (235, 224, "bicubic")
