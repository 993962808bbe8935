"""Tars and tables by the real command line: prepared, checked, trained from and evaluated."""

import json
from pathlib import Path

import pytest

from tests.containers import as_tables, as_tars, write_tar
from tests.e2e.commands import Place, needs_proc
from tests.e2e.test_image_folders import CONFIG
from tests.folders import make, plain

pytestmark = needs_proc


def images(here: Place) -> Path:
    root = make(here.folder / "images", train__a=8, train__b=8, train__c=8)
    for name, colour in (("a", (251, 11, 11)), ("c", (11, 11, 251))):
        plain(root / f"val/{name}/0.png", colour)
    return root


def score(here: Place, run: str) -> float:
    (answer,) = (here.folder / "runs" / run).glob("attempts/eval-*/eval.json")
    top1: float = json.loads(answer.read_text(encoding="utf-8"))["metrics"]["eval/top1"]
    return top1


def test_tars(here: Place) -> None:
    as_tars(images(here), here.folder / "tars", per_shard=5)
    (here.folder / "t.yaml").write_text(CONFIG.replace("imagefolder", "webdataset").replace("images", "tars"))
    assert here.run("check-data", "t.yaml").lines[-1] == "checked    26 images: all is well"
    here.run("train", "t.yaml", "max_epochs=8", "--nproc", "2", "--run-name", "t")
    here.run("eval", "t", "--nproc", "3", "--data", "images/val")
    assert score(here, "t") == 1.0
    write_tar(here.folder / "tars/train/00009.tar", {"x.png": b"no image", "x.cls": b"a"})
    checked = here.run("check-data", "t.yaml", code=1)
    assert f"broken     {here.folder}/tars/train/00009.tar/x.png: it is no image that can be read" in checked.lines
    said = here.run("resume", "t", "max_epochs=9", "--allow-changes", code=2).lines
    assert any("the number of training samples, and with it their order, changed: 24 -> 25" in line for line in said)


def test_what_is_no_tar_is_told_before_a_folder_is_made(here: Place) -> None:
    images(here)
    (here.folder / "t.yaml").write_text(CONFIG.replace("imagefolder", "webdataset"))
    (line,) = here.run("train", "t.yaml", code=2).lines
    assert line.endswith("/images/train has no .tar file; wanted are shards in WebDataset's layout")
    assert not (here.folder / "runs").exists()


def test_tables(here: Place) -> None:
    pytest.importorskip("datasets")
    as_tables(images(here), here.folder / "saved")
    (here.folder / "t.yaml").write_text(CONFIG.replace("imagefolder", "huggingface").replace("images", "cache"))
    path = "data.huggingface.path=saved"
    assert here.run("check-data", "t.yaml", path).lines[-1] == "checked    26 images: all is well"
    here.run("train", "t.yaml", path, "max_epochs=8", "--nproc", "2", "--run-name", "t")
    here.run("eval", "t")
    assert score(here, "t") == 1.0
    missing = here.run("train", "t.yaml", path, "data.huggingface.eval_split=test", code=2)
    assert (
        "config error: data.huggingface.path: saved has train, validation, not 'test'; set train_split"
        in missing.output
    )


def test_a_student_of_a_finished_run(here: Place) -> None:
    (line,) = here.run("train", "tiny.yaml", "loss.teacher=runs/master", code=2).lines
    assert line.endswith("/runs/master; give that of a finished run, such as runs/NAME")
    here.run("train", "tiny.yaml", "max_epochs=1", "--run-name", "master")
    student = here.run("train", "tiny.yaml", "loss.teacher=runs/master", "max_epochs=1", "--run-name", "student")
    assert "teacher    runs/master: " in student.output
