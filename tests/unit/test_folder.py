"""Which files of a folder are samples, of which class, in which order."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from configs.data_section import DataConfig
from configs.errors import ConfigError, EnvironmentProblem, TrainingError
from tests.folders import make, plain
from trainer.data.datasets import load_data
from trainer.data.encoded import Splits
from trainer.data.folder import Files, load_folder
from trainer.data.other_folder import load_only

RED = (255, 0, 0)


def config(root: Path, **more: Any) -> DataConfig:
    return DataConfig(name="imagefolder", root=str(root), **more)


def load(root: Path, **more: Any) -> Splits:
    return load_folder(config(root, **more))


def names(files: Files, root: Path) -> list[str]:
    return [str(Path(files.path(index)).relative_to(root)) for index in range(len(files))]


def test_samples_have_the_classes_of_train_in_both_splits(tmp_path: Path) -> None:
    splits = load(make(tmp_path, train__a=2, train__b=1, train__c=1, val__a=1, val__c=1))
    assert splits.classes == ("a", "b", "c")
    assert names(splits.train, tmp_path) == ["train/a/00.png", "train/a/01.png", "train/b/00.png", "train/c/00.png"]
    assert splits.train.labels.tolist() == [0, 0, 1, 2]
    assert names(splits.evaluation, tmp_path) == ["val/a/00.png", "val/c/00.png"]
    assert splits.evaluation.labels.tolist() == [0, 2]
    assert splits.notes == ("note: 1 of 3 classes have no image to evaluate: b",)


def test_a_class_of_val_alone_is_refused_with_both_folders(tmp_path: Path) -> None:
    make(tmp_path, train__a=1, train__b=1, val__a=1, val__zebra=1)
    (tmp_path / "train/zebra").mkdir()  # an empty folder is no class
    with pytest.raises(ConfigError, match=rf"{tmp_path}/val has class 'zebra', of which {tmp_path}/train has no image"):
        load(tmp_path)


def test_another_number_of_classes_is_refused_with_both(tmp_path: Path) -> None:
    make(tmp_path, train__a=1, train__b=1, train__c=1, val__a=1)
    with pytest.raises(ConfigError, match=r"data.num_classes is 2 but .* has 3 classes"):
        load_data(config(tmp_path, num_classes=2))


def test_what_is_no_data_is_left_out_and_counted(tmp_path: Path) -> None:
    make(tmp_path, train__a=2, train__b=2, val__a=1, val__b=1)
    train = tmp_path / "train"
    for name in (".DS_Store", "README.txt", "stray.png"):
        (train / name).write_bytes(b"x")
    for name in ("Thumbs.db", "desktop.ini", "notes.txt", ".hidden.png", "._00.png", "nosuffix"):
        (train / "a" / name).write_bytes(b"x")
    (train / "empty").mkdir()
    (train / ".ipynb_checkpoints").mkdir()
    plain(train / ".ipynb_checkpoints" / "00.png", RED)
    plain(train / "__MACOSX" / "._00.png", RED)
    (train / "b" / "gone.png").symlink_to(tmp_path / "nothing.png")
    (train / "b" / "self.png").symlink_to(train / "b" / "self.png")
    (train / "self").symlink_to(train / "self")
    os.mkfifo(train / "b" / "pipe.png")
    plain(train / "b" / "UPPER.PNG", RED)
    splits = load(tmp_path)
    assert splits.classes == ("a", "b")
    assert names(splits.train, train) == ["a/00.png", "a/01.png", "b/00.png", "b/01.png", "b/UPPER.PNG"]
    # Hidden: two at the top, two in a, one in __MACOSX. At the top: a text, an image, a link to itself.
    (line,) = splits.notes
    assert line == (
        f"left out   of {train}: 3 a link to nothing or no plain file, 3 beside the class folders, 5 hidden, "
        "4 without an image's suffix (.db, .ini, .txt, none), 2 class folders without an image (__MACOSX, empty)"
    )


def test_links_are_followed_and_circles_are_not(tmp_path: Path) -> None:
    make(tmp_path, train__a=1, train__b=1, val__a=1)
    plain(tmp_path / "elsewhere" / "deep" / "0.png", RED)
    train = tmp_path / "train"
    (train / "linked").symlink_to(tmp_path / "elsewhere")
    (train / "a" / "up").symlink_to(train / "a")
    (tmp_path / "elsewhere" / "deep" / "root").symlink_to(train)
    splits = load(tmp_path)
    assert splits.classes == ("a", "b", "linked")
    assert names(splits.train, train) == ["a/00.png", "b/00.png", "linked/deep/0.png"]
    assert "2 in a circle of links" in splits.notes[0]


def test_the_order_is_that_of_bytes(tmp_path: Path) -> None:
    folders = ["B", "a-b", "a", "ä", "日本"]
    for folder in folders:
        for name in ("Z.png", "a.png", "é.png"):
            plain(tmp_path / "train" / folder / name, RED)
    plain(tmp_path / "val" / "a" / "0.png", RED)
    splits = load(tmp_path)
    # '-' comes before '/', so a-b/ before a/.
    in_order = sorted(
        (f"{folder}/{name}" for folder in folders for name in ("Z.png", "a.png", "é.png")), key=lambda p: p.encode()
    )
    assert names(splits.train, tmp_path / "train") == in_order
    assert in_order[3] == "a-b/Z.png"
    assert splits.classes == ("B", "a", "a-b", "ä", "日本")
    assert [splits.classes[label] for label in splits.train.labels] == [name.partition("/")[0] for name in in_order]


def test_names_that_are_no_text_are_read(tmp_path: Path) -> None:
    make(tmp_path, train__a=1, train__b=1, val__a=1)
    odd = os.fsencode(tmp_path) + b"/train/a/\xff\n.png"
    Path(os.fsdecode(odd)).write_bytes((tmp_path / "train/a/00.png").read_bytes())
    data = load_data(config(tmp_path))
    image, label = data.train[1]
    assert (image[:, 0, 0].tolist(), label) == ([250, 10, 10], 0)
    assert os.fsencode(load(tmp_path).train.path(1)) == odd


@pytest.mark.parametrize(
    ("layout", "more", "told"),
    [
        ({}, {}, "there is no folder"),
        ({"train__a": 1, "train__b": 1}, {}, r"has no val/; make it, .* or set data.val_fraction"),
        ({"a": 1, "b": 1}, {}, "has no train/ and no val/"),
        ({"train__a": 1, "val__a": 1}, {}, r"/train has a; wanted is a folder of images for each of two classes"),
        ({"train__a": 1, "train__b": 1, "val__a": 0}, {}, "has no val/"),
        ({"train__a": 1, "train__b": 1, "val__a": 1}, {"val_fraction": 0.5}, r"has train/ and val/ already; leave it"),
        ({"a": 1, "b": 1}, {"val_fraction": 0.01}, "has no image to evaluate"),
    ],
)
def test_a_layout_that_is_none_is_told(
    tmp_path: Path, layout: dict[str, int], more: dict[str, float], told: str
) -> None:
    make(tmp_path / "data", **layout)
    with pytest.raises(ConfigError, match=told):
        load(tmp_path / "data", **more)


def test_an_unreadable_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, train__a=1, train__b=1, val__a=1)
    scandir = os.scandir

    def refusing(folder: Any) -> Any:
        if folder.endswith(b"/b"):
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(EnvironmentProblem, match=r"cannot read the folder .*/train/b: Permission denied"):
        load(tmp_path)


def test_a_share_is_kept_by_the_hash_of_the_path_alone(tmp_path: Path) -> None:
    make(tmp_path, a=40, b=40, c=1)
    before = load(tmp_path, val_fraction=0.3)

    def below(name: str) -> bool:
        return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) < 0.3 * 2**64

    all_names = [f"{folder}/{number:02d}.png" for folder, count in (("a", 40), ("b", 40)) for number in range(count)]
    assert names(before.evaluation, tmp_path) == [name for name in all_names if below(name)]
    assert names(before.train, tmp_path) == [name for name in all_names if not below(name)] + ["c/00.png"]
    # More files: none of the old ones changes sides.
    for number in range(40, 80):
        plain(tmp_path / "a" / f"{number}.png", RED)
    after = load(tmp_path, val_fraction=0.3)
    assert set(names(before.evaluation, tmp_path)) < set(names(after.evaluation, tmp_path))
    assert set(names(before.train, tmp_path)) < set(names(after.train, tmp_path))


def test_no_class_is_wholly_kept_for_evaluation(tmp_path: Path) -> None:
    make(tmp_path, a=3, b=3)
    splits = load(tmp_path, val_fraction=0.9999)
    assert splits.train.labels.tolist() == [0, 1]
    assert splits.evaluation.labels.tolist() == [0, 0, 1, 1]


def test_the_fingerprint_is_that_of_names_and_sizes(tmp_path: Path) -> None:
    def fingerprints() -> dict[str, str] | None:
        return load_data(config(tmp_path)).files

    make(tmp_path, train__a=1, train__b=1, val__a=1)
    before = fingerprints()
    size = (tmp_path / "val/a/00.png").stat().st_size
    assert before is not None
    assert before["eval"] == hashlib.sha256(b"a/00.png\0%d\n" % size).hexdigest()
    os.utime(tmp_path / "train/a/00.png")
    assert fingerprints() == before
    with (tmp_path / "train/a/00.png").open("ab") as file:
        file.write(b"x")
    changed = fingerprints() or {}
    assert (changed["train"] != before["train"], changed["eval"] == before["eval"]) == (True, True)
    (tmp_path / "train/a/00.png").rename(tmp_path / "train/a/01.png")
    assert (fingerprints() or {})["train"] != changed["train"]


def test_the_next_image_that_can_be_read_takes_the_place_of_a_bad_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, train__a=3, train__b=3, val__a=1)
    for name in ("a/01", "b/01", "b/02"):
        (tmp_path / "train" / f"{name}.png").write_bytes(b"")
    log = tmp_path / "bad.txt"
    split = load_data(config(tmp_path, on_bad_image="skip"), log).train
    found = [(tuple(image[:, 0, 0].tolist()), label) for image, label in (split[index] for index in range(6))]
    first, third, fourth = ((250, 10, 10), 0), ((248, 8, 8), 0), ((10, 250, 10), 1)
    # After the last comes the first.
    assert found == [first, third, third, fourth, first, first]
    bad = [str(tmp_path / "train" / name) for name in ("a/01.png", "b/01.png", "b/02.png")]
    assert log.read_text().splitlines() == bad
    assert capsys.readouterr().out.splitlines()[0] == (
        f"bad image  {bad[0]}: it is empty; in its place {tmp_path}/train/a/02.png"
    )
    # Another process of the run lists none of them twice, and counts them all.
    other = load_data(config(tmp_path, on_bad_image="skip", max_bad_images=2), log).train
    with pytest.raises(TrainingError, match=rf"3 images cannot be decoded and data.max_bad_images is 2; .* in {log}"):
        other[4]
    assert log.read_text().splitlines() == bad
    assert capsys.readouterr().out == ""


def test_a_split_of_bad_images_ends(tmp_path: Path) -> None:
    make(tmp_path, train__a=1, train__b=1, val__a=1)
    (tmp_path / "val/a/00.png").write_bytes(b"")
    split = load_data(config(tmp_path, on_bad_image="skip"), tmp_path / "bad.txt").evaluation
    with pytest.raises(TrainingError, match="none of the 1 images of the evaluation split can be decoded"):
        split[0]


def test_what_the_system_refuses_is_no_bad_image(tmp_path: Path) -> None:
    make(tmp_path, train__a=2, train__b=1, val__a=1)
    split = load_data(config(tmp_path, on_bad_image="skip"), tmp_path / "bad.txt").train
    (tmp_path / "train/a/00.png").unlink()
    with pytest.raises(EnvironmentProblem, match=r"cannot read .*/train/a/00.png: No such file or directory"):
        split[0]
    assert not (tmp_path / "bad.txt").exists()


def test_grey_images_have_one_channel(tmp_path: Path) -> None:
    make(tmp_path, train__a=1, train__b=1, val__a=1)
    image, _ = load_data(config(tmp_path, channels=1)).train[0]
    assert image.shape == (1, 8, 8)
    assert image.unique().tolist() == [round(0.299 * 250 + 0.587 * 10 + 0.114 * 10)]


def test_another_folder_has_the_numbers_of_the_names_it_is_matched_by(tmp_path: Path) -> None:
    # By themselves they would be numbered in another order, and b is no UTF-8. A folder cannot have a slash.
    odd = os.fsdecode(b"b\xff")
    for name in ("T-shirt_top", odd, "Z"):
        plain(tmp_path / name / "0.png", RED)
    files, notes = load_only(tmp_path, ["Z", "missing", odd, "T-shirt/top"])
    assert names(files, tmp_path) == ["T-shirt_top/0.png", "Z/0.png", f"{odd}/0.png"]
    assert files.labels.tolist() == [3, 0, 2]
    assert notes == ["note: 1 of 4 classes have no image here: missing"]


def test_another_folder_may_share_a_name_of_two_classes_only_if_it_lacks_it(tmp_path: Path) -> None:
    plain(tmp_path / "crane" / "0.png", RED)
    plain(tmp_path / "cat" / "0.png", RED)
    with pytest.raises(ConfigError, match="several classes of the run are named 'crane', so nothing says which"):
        load_only(tmp_path, ["crane", "cat", "crane"])
    files, _ = load_only(tmp_path, ["crane", "cat", "dog", "dog"])
    assert files.labels.tolist() == [1, 0]
