"""The schema itself: defaults, strictness, rules between knobs, and the names that other code relies on."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from configs import reference
from configs.contract import WorkerPlan
from configs.schema import AT_MOST_ONE_OF, FREE_ON_RESUME, KNOBS, ONE_OF, SECTIONS, RunConfig
from configs.values import Section, did_you_mean


def config(**fields: Any) -> RunConfig:
    return RunConfig.model_validate({"max_steps": 10, "global_batch_size": 8} | fields)


def refused(match: str, **fields: Any) -> None:
    with pytest.raises(ValidationError, match=match):
        config(**fields)


def test_only_length_and_batch_size_must_be_given() -> None:
    assert config() == RunConfig(max_steps=10, global_batch_size=8)


@pytest.mark.parametrize("pair", ONE_OF)
def test_exactly_one_spelling_is_needed(pair: tuple[str, str]) -> None:
    first, second = pair
    refused(f"{first} and {second} are two spellings of one thing; give one", **{first: 1, second: 1})
    refused(f"give {first} or {second}", **{first: None, second: None})
    assert config(**{first: 3, second: None}) != config(**{first: None, second: 3})


def test_at_most_one_spelling_of_warmup() -> None:
    assert AT_MOST_ONE_OF == (("schedule.warmup_steps", "schedule.warmup_epochs"),)
    refused("warmup_steps and warmup_epochs are two spellings", schedule={"warmup_steps": 1, "warmup_epochs": 1.0})


@pytest.mark.parametrize("spelling", ["no", "off", "false", "fp32", "none", "NO", False, None])
def test_every_spelling_of_full_precision(spelling: Any) -> None:
    assert config(mixed_precision=spelling).mixed_precision == "no"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_float64_goes_with_no_mixed_precision(precision: str) -> None:
    refused(
        f"dtype: float64 goes with mixed_precision: no, not {precision}", dtype="float64", mixed_precision=precision
    )
    for allowed in ("auto", "no"):
        assert config(dtype="float64", mixed_precision=allowed).dtype == "float64"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"optim": {"name": "adamw", "momentum": 0.9}}, "momentum is for sgd, rmsprop and muon; adamw takes betas"),
        ({"optim": {"nesterov": True}}, "nesterov needs name: sgd or muon, and momentum > 0"),
        ({"optim": {"betas": [0.9, 1.0]}}, r"betas are two numbers in \[0, 1\), got \[0.9, 1.0\]"),
        ({"optim": {"betas": [0.9]}}, "betas are two numbers"),
        ({"data": {"mean": [0.5]}}, "mean and std are given together or not at all"),
        ({"data": {"mean": [0.5], "std": [0.5, 0.5]}}, "mean has 1 channels and std 2"),
        ({"data": {"mean": [0.5], "std": [0.0]}}, r"std must be positive, got \[0.0\]"),
        ({"data": {"mean": [], "std": []}}, "at least 1 item"),
        ({"data": {"mean": [float("nan")], "std": [1.0]}}, "finite"),
        ({"data": {"name": "cifar"}}, "'cifar' is unknown .* did you mean 'cifar1"),
        ({"data": {"name": ":x"}}, "':x' is unknown"),
        ({"model": {"name": "mlp2"}}, "'mlp2' is unknown .* did you mean 'mlp'"),
        ({"seed": 2**63}, "less than or equal"),
        ({"max_steps": True}, "valid integer"),
        ({"max_steps": 1.5}, "valid integer"),
        ({"max_steps": "10"}, "valid integer"),
        ({"optim": {"lr": "0.1"}}, "valid number"),
        ({"no_such": 1}, "not permitted"),
    ],
)
def test_rules(fields: dict[str, Any], match: str) -> None:
    refused(match, **fields)


@pytest.mark.parametrize("name", ["mnist_cnn", "torchvision/resnet18", "my.nets:Net", "nets:make.inner"])
def test_model_names(name: str) -> None:
    assert config(model={"name": name}).model.name == name


def test_whole_floats_are_whole_numbers() -> None:
    chosen = config(max_steps=1e3, checkpoint={"keep": 3.0}, schedule={"warmup_steps": 5.0}, seed=7.0)
    assert (chosen.max_steps, chosen.checkpoint.keep, chosen.schedule.warmup_steps, chosen.seed) == (1000, 3, 5, 7)
    assert type(chosen.max_steps) is int


def test_configs_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().optim.lr = 1.0


def test_knobs_are_all_leaves_by_dotted_name() -> None:
    def leaves(section: BaseModel, prefix: str = "") -> list[str]:
        found: list[str] = []
        for name in type(section).model_fields:
            value = getattr(section, name)
            found += leaves(value, f"{prefix}{name}.") if isinstance(value, Section) else [prefix + name]
        return found

    assert list(KNOBS) == leaves(config())
    assert {"data", "data.augment", "optim", "launch"} <= SECTIONS
    assert not SECTIONS & KNOBS.keys()


def test_names_that_others_rely_on_exist() -> None:
    names = KNOBS.keys() | SECTIONS
    assert set(FREE_ON_RESUME) <= names
    assert {key for pair in (*ONE_OF, *AT_MOST_ONE_OF) for key in pair} <= KNOBS.keys()


def test_a_config_survives_json_as_the_launcher_sends_it() -> None:
    chosen = config(
        data={"mean": [0.5], "std": [0.25]},
        model={"args": {"width": 8}},
        optim={"betas": [0.8, 0.9]},
        mixed_precision="no",
    )
    assert RunConfig.model_validate(json.loads(json.dumps(chosen.model_dump(mode="json")))) == chosen
    assert "config" in WorkerPlan.__dataclass_fields__


@pytest.mark.parametrize(
    ("word", "text"), [("Adamw", "; did you mean 'adamw'?"), ("sdg", "; did you mean 'sgd'?"), ("lion", "")]
)
def test_did_you_mean(word: str, text: str) -> None:
    assert did_you_mean(word, ["sgd", "adam", "adamw"]) == text


def test_the_reference_page_is_what_the_schema_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference.page() + "\n", "run: python -m configs.reference > docs/configuration.md"


def test_every_knob_is_explained() -> None:
    unexplained = [key for key, section in KNOBS.items() if not section.model_fields[key.split(".")[-1]].description]
    assert unexplained == []


def test_virtual_shards_are_a_power_of_two_and_no_sync_batchnorm() -> None:
    refused("6 is not a power of two; use 4 or 8", virtual_shards=6)
    refused("virtual_shards and sync_batchnorm", virtual_shards=2, sync_batchnorm=True)
    assert [config(virtual_shards=number).virtual_shards for number in (0, 1, 2, 64)] == [0, 1, 2, 64]


def test_settings_of_image_folders_are_for_them_alone() -> None:
    refused(
        "val_fraction: only for name: imagefolder or webdataset or huggingface, and name is mnist",
        data={"val_fraction": 0.1},
    )
    for fraction in (0.0, 1.0):
        refused("val_fraction", data={"name": "imagefolder", "val_fraction": fraction})
    assert config(data={"name": "imagefolder", "val_fraction": 0.1}).data.val_fraction == 0.1


def test_mean_and_std_fit_the_channels_of_an_image_folder() -> None:
    grey = {"name": "imagefolder", "channels": 1, "mean": [0.5], "std": [0.5]}
    assert config(data=grey).data.channels == 1
    three = {"mean": [0.5] * 3, "std": [0.5] * 3}
    assert config(data={"name": "imagefolder"} | three).data.channels == 3
    refused("mean has 3 channels and the images have channels: 1", data=grey | three)


def test_geometry_of_an_image_folder() -> None:
    def folder(**more: Any) -> dict[str, Any]:
        return {"name": "imagefolder"} | more

    refused(
        "resize_size is 200 and needs an image_size that is no larger", data=folder(image_size=224, resize_size=200)
    )
    refused("resize_size is 200 and needs an image_size", data=folder(resize_size=200))
    refused("image_size: only for name: imagefolder", data={"image_size": 32})
    crops = {"crop_scale": [0.5, 1.0]}
    refused("augment.crop_scale and augment.crop_ratio need image_size", data={"augment": crops})
    refused("would keep one random crop", data=folder(image_size=32, residency="device"))
    for name, value in (("crop_scale", [0.5, 0.2]), ("crop_scale", [0.0, 1.0]), ("crop_scale", [0.5, 1.5])):
        refused("is not a range of positive numbers up to 1", data=folder(image_size=32, augment={name: value}))
    refused(
        "crop_ratio: .* is not a range of positive numbers", data=folder(image_size=32, augment={"crop_ratio": [2, 1]})
    )
    resident = folder(image_size=32, residency="device", augment={"crop_scale": None, "crop_ratio": [1.0, 2.0]})
    assert config(data=resident).data.augment.crop_ratio == (1.0, 2.0)
    assert config(data=folder(image_size=32, resize_size=32, augment=crops)).data.augment.crop_scale == (0.5, 1.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"per_device_batch_size": 8}, "virtual_shards needs global_batch_size"),
        ({"global_batch_size": 8, "compile": "auto"}, "would compile by a clock"),
    ],
)
def test_what_would_make_equal_bits_a_matter_of_chance_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RunConfig.model_validate({"max_epochs": 1, "virtual_shards": 2} | settings)
