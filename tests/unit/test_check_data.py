"""What check-data finds in a folder of images, and what it draws."""

import hashlib
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from configs.errors import EnvironmentProblem
from configs.schema import RunConfig
from tests.folders import COLOURS, make, noisy, plain
from trainer import check_data
from trainer.check_data import check
from trainer.data.datasets import load_data
from trainer.data.splits import load_splits


def config(root: Path, **data: Any) -> RunConfig:
    data = {"name": "imagefolder", "root": str(root)} | data
    return RunConfig.model_validate({"max_epochs": 1, "global_batch_size": 1, "data": data})


def checked(root: Path, picture: Path, capsys: pytest.CaptureFixture[str], **data: Any) -> tuple[int, list[str]]:
    code = check(config(root, **data), picture)
    return code, capsys.readouterr().out.splitlines()


def test_a_sound_folder_is_counted_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make(tmp_path / "images", train__a=3, train__b=1)
    for number, size in enumerate([(10, 20), (40, 8)]):
        plain(root / f"val/a/{number}.png", (number, 99, 99), size)
    picture = tmp_path / "new" / "samples.png"
    code, lines = checked(root, picture, capsys)
    assert code == 0
    assert [line.split() for line in lines[1:5]] == [
        ["class", "train", "val"],
        ["a", "3", "2"],
        ["b", "1", "0"],
        ["all", "4", "2"],
    ]
    assert lines[0] == "note: 1 of 2 classes have no image to evaluate: b"
    assert lines[5:] == [
        "pixels     train: width 8 to 8, median 8; height 8 to 8, median 8",
        "pixels     val: width 10 to 40, median 10; height 8 to 20, median 8",
        f"samples    after augmentation: {picture}",
        "checked    6 images: all is well",
    ]
    # The first cell, 4 pixels from the corner: the first image in its own colour.
    pixels = np.array(Image.open(picture))
    assert (pixels[4:12, 4:12] == COLOURS["a"]).all()
    assert (pixels[:4] == 255).all()


def test_all_that_is_wrong_is_told_by_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make(tmp_path / "images", train__a=3, train__b=3, val__a=1, val__b=1)
    # Two empty files are no copies of each other; a copy has another name, in another class.
    for name in ("train/a/01.png", "train/b/01.png"):
        (root / name).write_bytes(b"")
    (root / "val/b/text.png").write_text("I am a picture")
    cut = root / "val/a/cut.jpg"
    Image.effect_noise((64, 64), 60).save(cut)
    cut.write_bytes(cut.read_bytes()[:-500])
    plain(root / "val/a/00.png", (1, 1, 1))
    shutil.copy(root / "train/a/02.png", root / "val/b/copy.jpg")
    shutil.copy(root / "train/b/00.png", root / "train/a/torn.png")
    plain(root / "val/b/00.png", (2, 2, 2))
    code, lines = checked(root, tmp_path / "samples.png", capsys)
    assert code == 1
    assert "note: 1 image of train are copies of others in it" in lines
    assert f"note: in two classes: {root}/train/a/torn.png is {root}/train/b/00.png" in lines
    broken = [line for line in lines if line.startswith("broken")]
    assert broken[:2] == [
        f"broken     {root}/train/a/01.png: it is empty",
        f"broken     {root}/train/b/01.png: it is empty",
    ]
    assert broken[2].startswith(f"broken     {cut}: image file is truncated")
    assert broken[3:] == [f"broken     {root}/val/b/text.png: it is no image that can be read"]
    assert [line for line in lines if line.startswith("in both")] == [
        f"in both    {root}/val/b/copy.jpg is {root}/train/a/02.png"
    ]
    assert lines[-1] == "checked    12 images: 5 problems"
    assert (tmp_path / "samples.png").is_file()  # of those that can be read


def test_a_copy_in_both_splits_is_enough_to_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make(tmp_path / "images", train__a=1, train__b=1, val__a=1)
    code, lines = checked(root, tmp_path / "samples.png", capsys)
    assert code == 1
    assert f"in both    {root}/val/a/00.png is {root}/train/a/00.png" in lines


def test_the_picture_is_what_training_sees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = noisy(tmp_path / "images", train__a=40, val__a=0)
    shutil.move(root / "train/a/39.png", tmp_path / "39.png")
    (root / "train/ä").mkdir()
    shutil.move(tmp_path / "39.png", root / "train/ä/39.png")
    plain(root / "val/a/0.png", (0, 0, 0))
    settings = {"image_size": 16, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
    code, lines = checked(root, tmp_path / "samples.png", capsys, **settings)
    assert code == 0, lines
    pixels = np.array(Image.open(tmp_path / "samples.png"))
    # 40 images on 32 places, in rows of eight; a cell of 16 pixels, a gap of 4, a caption of 14.
    assert pixels.shape == (4 + 4 * 34, 4 + 8 * 20, 3)
    train: Any = load_data(config(root, **settings).data).train
    for index, (x, y) in {0: (4, 4), 3: (64, 4), 11: (24, 38), 38: (144, 106)}.items():
        expected = train.sample(0, 0, index)[0].permute(1, 2, 0).numpy()
        assert np.abs(pixels[y : y + 16, x : x + 16].astype(int) - expected).max() <= 1
    assert re.search(r"^ä +1 +0$", "\n".join(lines), re.MULTILINE)


def test_pairs_that_are_mixed_are_drawn_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make(tmp_path / "images", train__a=1, train__b=1)
    plain(root / "val/a/0.png", (0, 0, 0))
    plain_picture, mixed_picture = tmp_path / "plain.png", tmp_path / "mixed.png"
    checked(root, plain_picture, capsys)
    code, _ = checked(root, mixed_picture, capsys, augment={"mixup": 50.0, "erasing": 0.0})
    assert code == 0
    before, after = (np.array(Image.open(path)).astype(int) for path in (plain_picture, mixed_picture))
    cells = [(slice(4, 12), slice(4, 12)), (slice(4, 12), slice(16, 24))]
    one, other = (before[cell] for cell in cells)
    # Beta(50, 50) is near to one half, and what one gives the other takes.
    assert (np.abs(after[cells[0]] - (one + other) / 2) < 60).all()
    assert (np.abs(after[cells[0]] - one) > 30).any()
    assert (np.abs(after[cells[0]] + after[cells[1]] - one - other) <= 1).all()


def test_policies_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = noisy(tmp_path / "images", train__a=8, train__b=1, val__a=0)
    plain(root / "val/a/0.png", (0, 0, 0))
    pictures = [tmp_path / f"{number}.png" for number in range(3)]
    settings: tuple[dict[str, Any], ...] = ({}, {"policy": "trivialaugment"}, {"policy": "trivialaugment"})
    for path, augment in zip(pictures, settings, strict=True):
        checked(root, path, capsys, image_size=16, augment=augment)
    contents = [np.array(Image.open(path)) for path in pictures]
    assert not np.array_equal(contents[0], contents[1])
    assert np.array_equal(contents[1], contents[2])


def test_grey_images_are_drawn_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make(tmp_path / "images", a=4, b=4)
    code, _ = checked(root, tmp_path / "samples.png", capsys, channels=1, val_fraction=0.5)
    assert code == 0
    with Image.open(tmp_path / "samples.png") as sheet:
        assert sheet.mode == "RGB"


def test_a_folder_without_a_readable_image_has_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "images"
    for name in ("train/a/0.png", "train/b/0.png", "val/a/0.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    code, lines = checked(root, tmp_path / "samples.png", capsys)
    assert (code, lines[-1]) == (1, "checked    3 images: 3 problems")
    assert not (tmp_path / "samples.png").exists()


@pytest.mark.parametrize("turn", [1, 6])
def test_a_large_jpeg_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    path = tmp_path / "large.jpg"
    Image.effect_noise((640, 480), 60).save(path, exif=exif)
    content = path.read_bytes()
    files = load_splits(config(make(tmp_path / "images", train__a=1, train__b=1, val__a=1)).data).train
    monkeypatch.setattr(type(files), "open", lambda *_: str(path))
    found = check_data.examine(files, 0, 3)
    assert found == (hashlib.sha256(content).digest(), (640, 480) if turn == 1 else (480, 640), None)
    path.write_bytes(content[: len(content) * 95 // 100])
    assert "truncated" in (check_data.examine(files, 0, 3).fault or "")


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_reader_that_is_killed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make(tmp_path / "images", train__a=1, train__b=1, val__a=1)
    monkeypatch.setattr(check_data, "examine", killed)
    with pytest.raises(EnvironmentProblem, match="was killed, usually because memory ran out"):
        check(config(root), tmp_path / "samples.png")
