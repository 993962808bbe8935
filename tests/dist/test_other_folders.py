"""Evaluation on a folder that is not the run's: classes are matched by name; what concerns training is not asked."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from configs.folders import with_folder
from configs.known_data import KNOWN_DATA
from configs.schema import RunConfig
from tests.dist.harness import Attempt, finished, run, tiny_config
from tests.folders import make, plain
from trainer.data.datasets import load_data
from trainer.prepare import prepare_data


def of_images(root: Path, **more: Any) -> RunConfig:
    return tiny_config(data={"name": "imagefolder", "root": str(root), "num_workers": 0}, **more)


def evaluated(run_path: Path, config: RunConfig, folder: Path, world_size: int = 1, **more: Any) -> Attempt:
    plan = {"mode": "eval", "checkpoint": "last", "eval_data": str(folder)} | more
    return finished(run_path, with_folder(config, folder), world_size, **plan)


def rows(attempt: Attempt) -> list[dict[str, Any]]:
    content = json.loads((attempt.attempt.path / "evaluation.json").read_text())
    found: list[dict[str, Any]] = content["raw"]["classes"]
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": {"class_weights": "balanced"}},
        {"drop_last": True},
        {"data__sampling": "balanced"},
        {"eval__flip": True},
        {"ema__half_life_samples": 20.0},
    ],
    ids=str,
)
def test_what_concerns_training_alone_is_not_asked_of_a_folder(tmp_path: Path, settings: dict[str, Any]) -> None:
    # One image of one class of three, on one process and on more than there are images.
    config = of_images(make(tmp_path / "images", train__a=4, train__b=4, train__c=4, val__a=1), **settings)
    trained = finished(tmp_path / "run", config)
    before = {path: path.read_bytes() for path in trained.run_dir.path.glob("*.*")}
    other = make(tmp_path / "other", c=1)
    found = []
    for world_size in (1, 2, 3):
        attempt = evaluated(tmp_path / "run", config, other, world_size)
        assert "note: 2 of 3 classes have no image here: a, b" in attempt.log()
        assert "of the 1 of 3 classes that have samples" in attempt.log()
        assert [(row["class"], row["count"]) for row in rows(attempt)] == [("a", 0), ("b", 0), ("c", 1)]
        found.append(json.loads((attempt.attempt.path / "evaluation.json").read_text()))
    assert found[0]["data"] == str(other)
    assert found[0]["samples"] == 1
    assert found == [found[0]] * 3
    assert {path: path.read_bytes() for path in trained.run_dir.path.glob("*.*")} == before


def test_a_run_of_several_updates_a_call_is_evaluated_through_workers(tmp_path: Path) -> None:
    data = {"residency": "device", "augment": {"crop_scale": None}, "image_size": 8}
    config = of_images(make(tmp_path / "images", train__a=8, train__b=8, val__a=2))
    data = config.data.model_dump() | data
    config = RunConfig.model_validate(config.model_dump() | {"data": data})
    finished(tmp_path / "run", config)
    several = config.model_copy(update={"steps_per_execution": 2})
    for world_size in (1, 2):
        attempt = evaluated(tmp_path / "run", several, make(tmp_path / f"other-{world_size}", b=3), world_size)
        assert [row["count"] for row in rows(attempt)] == [0, 3]


@pytest.mark.parametrize("world_size", [1, 2])
def test_files_of_a_built_in_data_set_are_answered_as_the_set_itself(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(data={"name": "mnist", "root": str(tmp_path / "data")}, max_epochs=None, max_steps=40)
    config = config.model_copy(update={"global_batch_size": 64})
    prepare_data(config.data)
    trained = finished(tmp_path / "run", config)
    split = load_data(config.data).evaluation
    chosen = [index for index in range(200) if int(split[index][1]) in (1, 3, 7)]
    names = KNOWN_DATA["mnist"].classes
    assert names is not None
    for index in chosen:
        image, label = split[index]
        path = tmp_path / "files" / names[int(label)] / f"{index:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(path)
    # The network by hand: a hidden layer and a head, on pixels normalised as MNIST's are.
    first, head = (trained.export()[f"{name}.weight"] for name in layers(trained))
    first_bias, head_bias = (trained.export()[f"{name}.bias"] for name in layers(trained))
    expected = torch.zeros(10, 10, dtype=torch.int64)
    for index in chosen:
        image, label = split[index]
        pixels = (image.float().flatten() / 255 - 0.1307) / 0.3081
        answer = int((head @ (first @ pixels + first_bias).relu() + head_bias).argmax())
        expected[int(label), answer] += 1
    attempt = evaluated(tmp_path / "run", config, tmp_path / "files", world_size)
    lines = (attempt.attempt.path / "confusion.csv").read_text().splitlines()
    assert [line.split(",")[1:] for line in lines[1:]] == [[str(count) for count in row] for row in expected.tolist()]
    assert sum(expected.diagonal().tolist()) > 0.5 * len(chosen)


def layers(trained: Attempt) -> list[str]:
    """The names of the two linear layers, in order."""
    return sorted(name.removesuffix(".weight") for name in trained.export() if name.endswith(".weight"))


def test_bad_images_are_left_out_and_listed_with_the_evaluation(tmp_path: Path) -> None:
    config = of_images(make(tmp_path / "images", train__a=4, train__b=4, val__a=1))
    skipping = RunConfig.model_validate(
        config.model_dump() | {"data": config.data.model_dump() | {"on_bad_image": "skip"}}
    )
    finished(tmp_path / "run", config)
    other = make(tmp_path / "other", a=2, b=2)
    bad = other / "a" / "01.png"
    bad.write_bytes(b"")
    plan = {"mode": "eval", "checkpoint": "last", "eval_data": str(other)}
    refused = run(tmp_path / "run", with_folder(config, other), **plan)
    assert refused.statuses == [1]
    assert f"{bad} (sample 1 of the evaluation split) cannot be decoded" in (refused.outcome().message or "")
    attempt = evaluated(tmp_path / "run", skipping, other)
    assert [row["count"] for row in rows(attempt)] == [1, 3]  # the next one, of b, stands in its place
    assert (attempt.attempt.path / "bad_images.txt").read_text() == f"{bad}\n"
    assert not attempt.run_dir.bad_images.exists()


@pytest.mark.parametrize("world_size", [1, 2])
def test_names_that_do_not_fit_are_told(tmp_path: Path, world_size: int) -> None:
    config = of_images(make(tmp_path / "images", train__a=4, train__b=4, val__a=1))
    trained = finished(tmp_path / "run", config)
    empty = tmp_path / "empty"
    empty.mkdir()
    strange = make(tmp_path / "strange", a=1, zebra=1)
    plain(strange / "B" / "0.png", (1, 2, 3))
    shared = make(tmp_path / "shared", a=1)
    cases = (
        (["a", "b"], strange, f"{strange} has 'B', 'zebra', which the run does not know as a class; it knows 'a', 'b'"),
        (["a", "b"], empty, f"{empty} has no folder of images"),
        (["a", "a"], shared, "several classes of the run are named 'a', so nothing says which the folder is"),
    )
    for names, folder, text in cases:
        trained.run_dir.classes.write_text(json.dumps(names))
        plan = {"mode": "eval", "checkpoint": "last", "eval_data": str(folder)}
        attempt = run(tmp_path / "run", with_folder(config, folder), world_size, **plan)
        assert attempt.statuses == [2] * world_size
        assert text in (attempt.outcome().message or "")
