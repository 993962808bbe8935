"""Learning from a finished run: the loss by hand, any number of processes, a resume, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.schema import RunConfig
from tests.dist import toys
from tests.dist.harness import finished, run, tiny_config
from tests.dist.test_resume import assert_same_ending
from tests.dist.test_shards import assert_same_bits

OTHER_PIXELS = {"data__mean": (0.5,), "data__std": (0.25,)}


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """A run of other initial weights, with pixels normalised otherwise."""
    return trained(tmp_path / "teacher", seed=7, **OTHER_PIXELS)


def trained(place: Path, **settings: Any) -> Path:
    """With the settings that the launcher would have written."""
    its = config(None, **settings)
    finished(place, its).run_dir.config.write_text(json.dumps(its.model_dump(mode="json")))
    return place


def config(teacher: Path | None, weight: float = 0.7, temperature: float = 3.0, **more: Any) -> RunConfig:
    follows = {"teacher": str(teacher), "teacher_weight": weight, "teacher_temperature": temperature}
    loss = {} if teacher is None else {"loss": follows}
    return tiny_config(**{"global_batch_size": 8, "model": {"name": "tests.dist.toys:WithBatchNorm"}} | loss | more)


def test_the_loss_is_hintons(tmp_path: Path, teacher: Path) -> None:
    """The first logged loss by hand: softmax, logarithm and sums, of the images of the first batch in any order."""
    double: dict[str, Any] = {"dtype": "float64", "log__every_steps": 1, "max_epochs": 1}
    attempt = finished(tmp_path / "run", config(teacher, **double), 1, {"TRAIN_SIZE": "8"})
    images, labels = toys.Images(8, 1).images.double() / 255, torch.tensor([toys.Images(8, 1)[i][1] for i in range(8)])
    torch.manual_seed(config(None).seed)
    student = toys.WithBatchNorm(4).double()
    master = toys.WithBatchNorm(4).double()
    master.load_state_dict(load_file(teacher / "model.safetensors"))
    with torch.no_grad():
        logits, answers = student(images), master.eval()((images - 0.5) / 0.25)
    hard = -logits.log_softmax(1)[range(8), labels].mean()
    taught, learned = (answers / 3).softmax(1), (logits / 3).softmax(1)
    soft = (taught * (taught / learned).log()).sum(1).mean() * 9
    assert attempt.metric("train/loss")[0] == (1, pytest.approx(float(0.3 * hard + 0.7 * soft), rel=1e-6))


def test_a_teacher_of_no_weight_teaches_nothing(tmp_path: Path, teacher: Path) -> None:
    alone = finished(tmp_path / "alone", config(None)).weights()
    ignored = finished(tmp_path / "ignored", config(teacher, weight=0.0)).weights()
    followed = finished(tmp_path / "followed", config(teacher)).weights()
    assert all(torch.equal(tensor, ignored[name]) for name, tensor in alone.items())
    assert not all(torch.equal(tensor, followed[name]) for name, tensor in alone.items())


def test_the_same_bits_on_any_number_of_processes(tmp_path: Path, teacher: Path) -> None:
    sharded = config(teacher, virtual_shards=4, max_per_device_batch_size=1, mixed_precision="fp16")
    alone = finished(tmp_path / "1", sharded, 1, {"TRAIN_SIZE": "26"})
    for world_size in (2, 4):
        assert_same_bits(alone, finished(tmp_path / str(world_size), sharded, world_size, {"TRAIN_SIZE": "26"}))


def test_a_killed_run_goes_on_with_the_same_teacher(tmp_path: Path, teacher: Path) -> None:
    whole = finished(tmp_path / "whole", config(teacher), 2)
    cut = config(teacher, checkpoint__every_steps=1, faults=[{"kind": "sigkill", "step": 3, "attempt": 1}])
    assert -9 in run(tmp_path / "cut", cut, 2).statuses
    again = finished(tmp_path / "cut", cut, 2)
    assert_same_ending(whole, again)
    assert again.checkpoint().shared["model"].keys() == whole.checkpoint().shared["model"].keys()
    assert f"teacher    {teacher}: tests.dist.toys:WithBatchNorm, 0.7 of the loss, at temperature 3" in again.log()


def test_another_teacher_under_the_same_name_is_refused_unless_allowed(tmp_path: Path, teacher: Path) -> None:
    finished(tmp_path / "run", config(teacher, max_epochs=1))
    shutil.rmtree(teacher)
    trained(teacher, seed=8)
    attempt = run(tmp_path / "run", config(teacher, max_epochs=2))
    assert attempt.statuses == [2]
    assert f"the weights of loss.teacher ({teacher}) changed since it was saved" in (attempt.outcome().message or "")
    finished(tmp_path / "run", config(teacher, max_epochs=2), allow_changes=True)
    finished(tmp_path / "run", config(None, max_epochs=3))


def test_what_is_no_teacher_is_named(tmp_path: Path, teacher: Path) -> None:
    (tmp_path / "empty").mkdir()
    trained(tmp_path / "other", data__name="tests.dist.toys:renamed_classes")
    trained(tmp_path / "yes-or-no", loss={"name": "bce"})
    for name, said in {
        "empty": "empty is no finished run; give the folder of one",
        "other": "other knows the classes ",
        "yes-or-no": "yes-or-no was trained with loss.name: bce, whose answers are each a yes or no",
    }.items():
        attempt = run(tmp_path / f"of-{name}", config(tmp_path / name), 2)
        assert attempt.statuses == [2, 2]
        assert said in (attempt.outcome().message or "")
