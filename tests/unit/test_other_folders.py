"""What a run's settings become where it is evaluated on a folder of other images."""

from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.folders import with_folder
from configs.run_dir import RunDir
from configs.schema import RunConfig
from launch.evaluation import load_for_evaluation
from launch.options import Options

CONFIG = "max_epochs: 1\nglobal_batch_size: 8\ndata: {name: imagefolder, root: images, image_size: 224}\n"
PLACE = Path("/photos")


def config(**data: Any) -> RunConfig:
    return RunConfig.model_validate({"max_epochs": 1, "global_batch_size": 8, "data": data})


def test_files_become_images_as_the_built_in_data_set_has_them() -> None:
    augment = {"flip": True, "policy": "randaugment"}
    data = with_folder(config(name="cifar10", residency="stream", augment=augment), PLACE).data
    assert (data.name, data.root, data.val_fraction) == ("imagefolder", str(PLACE), None)
    assert (data.channels, data.image_size, data.resize_size) == (3, 32, 32)
    assert (data.mean, data.std) == ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    assert not data.augment.flip
    grey = with_folder(config(name="mnist", residency="device", mean=[0.5], std=[0.25]), PLACE).data
    assert (grey.channels, grey.image_size, grey.mean, grey.std) == (1, 28, (0.5,), (0.25,))


def test_a_folder_of_images_stays_as_it_is_made() -> None:
    given = {"image_size": 224, "resize_size": 256, "channels": 1, "mean": [0.5], "std": [0.25], "val_fraction": 0.1}
    data = with_folder(config(name="imagefolder", root="images", **given), PLACE).data
    assert (data.root, data.val_fraction, data.image_size, data.resize_size) == (str(PLACE), None, 224, 256)
    assert (data.channels, data.mean, data.std) == (1, (0.5,), (0.25,))


def test_images_of_the_users_own_are_refused_with_what_to_say() -> None:
    with pytest.raises(ConfigError, match=r"nothing says how .*; say it by data.name=imagefolder with data.image_size"):
        with_folder(config(name="mine:photos"), PLACE)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "x")
    run.path.mkdir()
    run.config.write_text(CONFIG)
    (tmp_path / "photos").mkdir()
    return run


def loaded(run: RunDir, *overrides: str) -> tuple[RunConfig, list[str]]:
    options = Options(overrides, cwd=run.path.parent)
    settings, changed = load_for_evaluation(run, options, Path("photos"))
    return settings.config, changed


def test_settings_may_be_others_and_are_listed(run: RunDir) -> None:
    run.classes.write_text('["a", "b"]')
    settings, changed = loaded(run, "data.image_size=288", "data.resize_size=320", "eval.mode=rank0")
    assert (settings.data.image_size, settings.data.resize_size) == (288, 320)
    # --data itself is told as such, and eval.mode changes no result.
    assert changed == ["data.image_size: 224 -> 288", "data.resize_size: null -> 320"]
    assert loaded(run)[1] == []


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "run 'x' has no class names"),
        ("[", "classes.json cannot be read: "),
        ("[]", "classes.json is no list of class names"),
        ("[1, 2]", "classes.json is no list of class names"),
        ('{"a": 1}', "classes.json is no list of class names"),
    ],
)
def test_a_run_without_class_names_is_one_sentence(run: RunDir, content: str | None, text: str) -> None:
    if content is not None:
        run.classes.write_text(content)
    with pytest.raises(ConfigError) as caught:
        loaded(run)
    assert len(caught.value.problems) == 1
    assert text in str(caught.value)
