"""A folder of images by the real command line: checked, trained from, and what is wrong with it told."""

import json
import re

from tests.e2e.commands import Place, needs_proc
from tests.folders import make, plain

pytestmark = needs_proc

CONFIG = """\
max_epochs: 2
global_batch_size: 8
mixed_precision: no
device: cpu
data:
  name: imagefolder
  root: images
model:
  name: mlp
optim:
  lr: 0.1
  momentum: 0.9
launch:
  num_threads: 1
"""


def write_config(here: Place) -> None:
    (here.folder / "folder.yaml").write_text(CONFIG, encoding="utf-8")


def test_check_data_tells_by_its_exit_code_and_leaves_a_picture_alone(here: Place) -> None:
    write_config(here)
    make(here.folder / "images", train__a=2, train__b=2)
    plain(here.folder / "images/val/a/0.png", (1, 2, 3))
    before = set(here.folder.iterdir())
    command = here.run("check-data", "folder.yaml", "data.image_size=8", "device=cuda", "--out", "pictures")
    assert command.lines[-1] == "checked    5 images: all is well"
    assert [path.name for path in (here.folder / "pictures").iterdir()] == ["folder-samples.png"]
    (here.folder / "images/val/a/0.png").write_bytes(b"")
    command = here.run("check-data", "folder.yaml", code=1)
    assert f"broken     {here.folder}/images/val/a/0.png: it is empty" in command.lines
    new = {path.name for path in set(here.folder.iterdir()) - before}
    assert new == {"pictures", "folder-samples.png", "console-0.txt", "console-1.txt"}
    assert list(here.temporary.iterdir()) == []


def test_what_check_data_cannot_check_is_one_line(here: Place) -> None:
    write_config(here)
    (line,) = here.run("check-data", "folder.yaml", code=2).lines
    assert line.startswith(f"config error: data.root: there is no folder {here.folder}/images; ")
    (line,) = here.run("check-data", "tiny.yaml", code=2).lines
    assert line == (
        "config error: check-data is for data.name: imagefolder or webdataset or huggingface, and tiny.yaml has "
        "tests.dist.toys:images"
    )


def test_a_folder_is_trained_from_and_gone_on_with(here: Place) -> None:
    write_config(here)
    # Three colours, and no class b to evaluate: what has learned them has the classes right.
    images = make(here.folder / "images", train__a=8, train__b=8, train__c=8, val__a=2, val__c=2)
    for path in images.glob("val/*/*.png"):
        red, green, blue = (200, 60, 60) if path.parent.name == "a" else (60, 60, 200)
        plain(path, (red, green, blue), (30, 20))
    (images / "train" / "Thumbs.db").write_bytes(b"x")
    settings = ("data.image_size=16", "data.augment.flip=true")
    # Importing torchvision would cost each start 1.5 s; who imports what is in the log of the rank.
    command = here.run(
        "train", "folder.yaml", *settings, "--run-name", "x", "--nproc", "2", PYTHONPROFILEIMPORTTIME="1"
    )
    log = here.attempt("x").rank_log(1).read_text()
    assert re.search(r"\| +PIL.Image$", log, re.MULTILINE)
    assert not re.search(r"\| +torchvision$", log, re.MULTILINE)
    assert f"left out   of {images}/train: 1 beside the class folders" in command.output
    command = here.run("resume", "x", "max_epochs=12", "--allow-changes", "--nproc", "1")
    result = json.loads(here.run_dir("x").result.read_text())
    assert (result["metrics"]["eval/top1"], result["step"]) == (1.0, 12 * 3)
    assert json.loads(here.run_dir("x").classes.read_text()) == ["a", "b", "c"]


def test_a_changed_folder_is_one_sentence_on_resume(here: Place) -> None:
    write_config(here)
    make(here.folder / "images", train__a=4, train__b=4, val__a=2)
    here.run("train", "folder.yaml", "max_epochs=1", "--run-name", "x")
    (here.folder / "images/train/a/00.png").rename(here.folder / "images/train/a/99.png")
    longer = ("resume", "x", "max_time_s=1000")  # free to change, unlike the length
    config = here.run_dir("x").config
    config.write_text(config.read_text().replace("max_epochs: 1\n", "max_epochs: 2\n"))
    here.run_dir("x").result.unlink()
    command = here.run(*longer, code=2)
    assert "names or sizes of the files in images changed since it was saved (train split)" in command.last_lines
    assert "Traceback" not in command.output
    here.run(*longer, "--allow-changes")


def test_a_bad_image_is_named_at_the_end_of_the_screen(here: Place) -> None:
    write_config(here)
    make(here.folder / "images", train__a=6, train__b=6, val__a=2)
    bad = here.folder / "images/train/b/03.png"
    bad.write_text("I am a picture")
    command = here.run("train", "folder.yaml", "data.num_workers=2", "--nproc", "2", "--run-name", "x", code=1)
    assert f"{bad} (sample 9 of the training split) cannot be decoded: it is no image that can be read" in (
        command.last_lines
    )
    here.run("resume", "x", "data.on_bad_image=skip")
    assert here.run_dir("x").bad_images.read_text() == f"{bad}\n"


def test_a_probe_reads_past_a_bad_image(here: Place) -> None:
    write_config(here)
    make(here.folder / "images", train__a=8, train__b=8, val__a=2)
    for number in range(4):
        (here.folder / f"images/train/b/{number:02d}.png").write_bytes(b"")
    plan = here.run("plan", "folder.yaml", "--probe", "data.on_bad_image=skip")
    assert re.search(r"^images +16 training and 2 test$", plan.output, re.MULTILINE)
    assert not (here.folder / "runs").exists()


def test_another_folder_is_evaluated_with_its_classes_by_name(here: Place) -> None:
    write_config(here)
    make(here.folder / "images", train__a=8, train__b=8, train__c=8, val__a=2, val__c=2)
    here.run("train", "folder.yaml", "max_epochs=30", "--run-name", "x")
    result = here.run_dir("x").result.read_bytes()
    # Numbered by themselves, b and c would be classes 0 and 1.
    make(here.folder / "other", b=3, c=2)
    command = here.run("eval", "x", "--data", "other", "--nproc", "2")
    assert "note: 1 of 3 classes have no image here: a" in command.lines
    assert re.search(r"^evaluated 5/5: top-1 100\.00 %", command.output, re.MULTILINE)
    folder = here.attempt("x", "eval-001").path
    answer = json.loads((folder / "eval.json").read_text())
    assert (answer["data"], answer["metrics"]["eval/top1"]) == (str(here.folder / "other"), 1.0)
    classes = json.loads((folder / "evaluation.json").read_text())["raw"]["classes"]
    assert [(each["class"], each["count"], each["recall"]) for each in classes] == [
        ("a", 0, None),
        ("b", 3, 1.0),
        ("c", 2, 1.0),
    ]
    assert here.run_dir("x").result.read_bytes() == result
    make(here.folder / "other", zebra=1)
    (*_, line) = here.run("eval", "x", "--data", "other", code=2).lines
    assert f"--data: {here.folder}/other has 'zebra', which the run does not know as a class; it knows 'a', 'b'" in line
    (line,) = here.run("eval", "x", "--data", "nowhere", code=2).lines
    assert f"--data: there is no folder {here.folder}/nowhere; give the one that holds a folder for each" in line


def test_a_run_whose_images_are_its_own_cannot_be_given_files(here: Place) -> None:
    here.run("train", "tiny.yaml", "--run-name", "x")
    make(here.folder / "other", a=1)
    (line,) = here.run("eval", "x", "--data", "other", code=2).lines
    assert line.startswith("config error: --data: the run's data are tests.dist.toys:images, and nothing says how")
    # Its classes are a to d, and its images 8 x 8 and grey.
    said = ("data.name=imagefolder", "data.image_size=8", "data.channels=1", "data.residency=stream")
    command = here.run("eval", "x", "--data", "other", *said)
    assert "note: 3 of 4 classes have no image here: b, c, d" in command.lines
    here.run_dir("x").classes.unlink()
    (line,) = here.run("eval", "x", "--data", "other", *said, code=2).lines
    assert line.startswith("config error: --data: run 'x' has no class names (runs/x/classes.json is missing) to match")


def test_settings_other_than_the_runs_are_told(here: Place) -> None:
    write_config(here)
    make(here.folder / "images", train__a=4, train__b=4, val__a=2, val__b=2)
    # Eight pixels wide or sixteen: the same network takes both.
    net = ("model.name=tests.e2e.toys:Pooled", "data.image_size=8")
    here.run("train", "folder.yaml", *net, "max_epochs=1", "--run-name", "x")
    config = here.run_dir("x").config.read_bytes()
    command = here.run("eval", "x", "data.image_size=16", "eval.flip=true", "global_batch_size=3", "--nproc", "2")
    changes = ["global_batch_size: 8 -> 3", "data.image_size: 8 -> 16", "eval.flip: false -> true"]
    assert f"note: evaluated with other settings than the run's: {'; '.join(changes)}" in command.lines
    assert re.search(r"^evaluated 4/4 with flips: top-1 ", command.output, re.MULTILINE)
    content = json.loads((here.attempt("x", "eval-001").path / "evaluation.json").read_text())
    assert (content["changed_settings"], content["flip"], content["data"]) == (changes, True, "imagefolder")
    assert here.run_dir("x").config.read_bytes() == config
    assert "note: evaluated with" not in here.run("eval", "x").output
