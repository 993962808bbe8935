"""Tars in WebDataset's layout: which members are samples, where they lie, and what is refused."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from configs.data_section import DataConfig
from configs.errors import ConfigError, EnvironmentProblem
from tests.containers import as_tars, samples_of, write_tar
from tests.folders import make
from trainer.data import tar_index, tars
from trainer.data.decode import DecodingError
from trainer.data.encoded import Splits
from trainer.data.splits import load_splits


def load(root: Path, **more: Any) -> Splits:
    return load_splits(DataConfig.model_validate({"name": "webdataset", "root": str(root)} | more))


def contents(files: Any) -> list[bytes]:
    return [files.open(index).read() for index in range(len(files))]


def test_each_sample_is_read_from_its_place(tmp_path: Path) -> None:
    images = make(tmp_path / "images", train__b=5, train__a=3, val__b=2)
    splits = load(as_tars(images, tmp_path / "tars"))
    assert splits.classes == ("a", "b")
    assert contents(splits.train) == [content for _, content, _ in samples_of(images, "train")]
    assert splits.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert contents(splits.evaluation) == [content for _, content, _ in samples_of(images, "val")]
    assert splits.evaluation.labels.tolist() == [1, 1]
    assert splits.train.path(4) == f"{tmp_path}/tars/train/00001.tar/000004.png"


def test_members_are_grouped_by_what_comes_before_the_first_dot(tmp_path: Path) -> None:
    members = {
        "x/b.seg.png": b"mask", "x/b.JPG": b"image b", "x/b.cls": b" 1\n", "x/b.txt": b"a caption",
        "._x": b"of a Mac", "a.json": json.dumps({"label": 0, "more": [1]}).encode(), "a.webp": b"image a",
        "only.cls": b"1", "ü\udcff.png": b"image u", "ü\udcff.cls": b"1",
    }  # fmt: skip
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", members)
    splits = load(tmp_path)
    assert contents(splits.train) == [b"image b", b"image a", b"image u"]
    assert splits.train.labels.tolist() == [1, 0, 1]
    assert splits.classes == ("0", "1")
    assert splits.notes[0] == f"left out   of {tmp_path}/train: 1 samples without an image"


@pytest.mark.parametrize(
    ("labels", "names", "classes", "numbers"),
    [
        (["2", "0", "10"], None, tuple(map(str, range(11))), [2, 0, 10]),
        (["cat", "ant", "cat"], None, ("ant", "cat"), [1, 0, 1]),
        (["02", "1", "02"], None, ("02", "1"), [0, 1, 0]),  # names: no number is written so
        (["1", "0", "1"], "ant\ncat\n", ("ant", "cat"), [1, 0, 1]),
        (["1", "0", "1"], "1\n0\n", ("1", "0"), [1, 0, 1]),  # places, whatever they are called
        (["cat", "ant", "cat"], "cat\nant\n", ("cat", "ant"), [0, 1, 0]),
    ],
)
def test_labels_are_numbers_or_names(
    tmp_path: Path, labels: list[str], names: str | None, classes: tuple[str, ...], numbers: list[int]
) -> None:
    members = {}
    for number, label in enumerate(labels):
        members |= {f"{number}.png": b"x", f"{number}.cls": label.encode()}
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", members)
    if names is not None:
        (tmp_path / "classes.txt").write_text(names)
    splits = load(tmp_path)
    assert splits.classes == classes
    assert splits.train.labels.tolist() == numbers


GOOD = {"a.png": b"x", "a.cls": b"0", "b.png": b"y", "b.cls": b"1"}


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"a.png": b"x"}, "0.tar: sample a has an image and no a.cls or a.json with its class; add one"),
        ({"a.png": b"x", "a.cls": b""}, "0.tar: a.cls holds '', expected a class's name or number"),
        ({"a.png": b"x", "a.json": b"[1]"}, "0.tar: a.json holds '[1]', expected {\"label\": a class's name or"),
        ({"a.png": b"x", "a.jpg": b"x", "a.cls": b"1"}, "sample a has several images (a.png, a.jpg); leave one"),
        ({"a.txt": b"x"}, "data.root: no sample with an image is left for"),
        ({"a.png": b"x", "a.cls": b"1"}, "has the labels '1', which are no class of the training split"),
    ],
)
def test_what_is_no_sample_is_named(tmp_path: Path, members: dict[str, bytes], said: str) -> None:
    train = GOOD if "labels" not in said else {"a.png": b"x", "a.cls": b"cat", "b.png": b"x", "b.cls": b"dog"}
    write_tar(tmp_path / "train" / "0.tar", train)
    write_tar(tmp_path / "val" / "0.tar", members)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert said in str(caught.value)


def test_what_is_no_tar_is_named(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "whole.tar", {"a.png": bytes(100_000), "a.cls": b"0"}).read_bytes()
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", GOOD)
    for content in (b"", b"no tar" * 1000, whole[:50_000]):
        (tmp_path / "train" / "1.tar").write_bytes(content)
        with pytest.raises(
            EnvironmentProblem, match=r"train/1.tar is no tar file, or not a whole one: .*; fetch it again"
        ):
            load(tmp_path)
    (tmp_path / "train" / "1.tar").rename(tmp_path / "train" / "1.tar.gz")
    with pytest.raises(ConfigError, match=r"1.tar.gz is compressed, so no sample .*; unpack it to a .tar"):
        load(tmp_path)
    for path in (tmp_path / "train").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match=r"train has no .tar file; wanted are shards"):
        load(tmp_path)


def test_a_link_to_nothing_and_names_in_another_encoding_are_told(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", GOOD)
    (tmp_path / "classes.txt").write_bytes("été\nhiver\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"classes.txt is not UTF-8 .*; save it as that"):
        load(tmp_path)
    (tmp_path / "classes.txt").unlink()
    (tmp_path / "train" / "1.tar").symlink_to("nowhere.tar")
    with pytest.raises(EnvironmentProblem, match=r"cannot read .*train/1.tar: a link to nothing; mend it"):
        load(tmp_path)


def test_an_index_holds_until_a_tar_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", GOOD)
    first = load(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(tar_index, "_read", lambda *_: pytest.fail("the tars were read again"))
        again = load(tmp_path)
    assert contents(again.train) == contents(first.train)
    assert again.train.fingerprint == first.train.fingerprint
    write_tar(tmp_path / "train" / "0.tar", GOOD | {"c.png": b"z", "c.cls": b"1"})
    changed = load(tmp_path)
    assert len(changed.train) == 3
    assert changed.train.fingerprint != first.train.fingerprint
    (tmp_path / "train" / tar_index.INDEX).write_text('{"format": 1')  # cut short
    assert len(load(tmp_path).train) == 3


def test_a_folder_that_cannot_be_written_is_indexed_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tar_index, "write_atomically", refuse)
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", GOOD)
    assert len(load(tmp_path).train) == 2
    assert not (tmp_path / "train" / tar_index.INDEX).exists()


def test_a_share_is_kept_for_evaluation_by_the_names(tmp_path: Path) -> None:
    members = {}
    for number in range(40):
        members |= {f"{number}.png": bytes([number]), f"{number}.cls": str(number % 2).encode()}
    write_tar(tmp_path / "0.tar", members)
    splits = load(tmp_path, val_fraction=0.25)
    train, val = contents(splits.train), contents(splits.evaluation)
    assert sorted(train + val) == [bytes([number]) for number in range(40)]
    assert 4 <= len(val) <= 16
    write_tar(tmp_path / "1.tar", {"new.png": b"new", "new.cls": b"0"})
    more = load(tmp_path, val_fraction=0.25)
    assert set(train) <= set(contents(more.train)) | {b"new"}
    assert set(val) <= set(contents(more.evaluation)) | {b"new"}


def test_of_each_class_one_stays_to_be_trained_on(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", GOOD)
    with pytest.raises(ConfigError, match="no sample with an image is left"):
        load(tmp_path, val_fraction=0.99)
    samples = [(0, tar_index.Member(f"{n}.png", 0, 1, str(n % 3))) for n in range(30)]
    train, val = tars.split(samples, 0.999)
    assert {member.label for _, member in train} == {"0", "1", "2"}
    assert len(train) + len(val) == 30


def test_a_tar_that_was_cut_meanwhile_is_a_broken_image(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", GOOD | {"c.png": b"z" * 100_000, "c.cls": b"1"})
    train = load(tmp_path).train
    os.truncate(tmp_path / "train" / "0.tar", 20_000)
    with pytest.raises(DecodingError, match=r"its tar ends after [\d,]+ of its 100,000 bytes"):
        train.open(2)
    assert isinstance(source := train.open(0), io.BytesIO)
    assert source.read() == b"x"


def _num_open() -> int:
    folder = Path("/proc/self/fd")
    return len([*folder.iterdir()]) if folder.exists() else 0


def test_more_tars_than_may_be_open(tmp_path: Path) -> None:
    for number in range(tars._OPEN_TARS + 10):
        write_tar(tmp_path / "train" / f"{number:03d}.tar", {"a.png": bytes([number]), "a.cls": b"%d" % (number % 2)})
    write_tar(tmp_path / "val" / "0.tar", GOOD)
    train = load(tmp_path).train
    before = _num_open()
    for _ in range(2):
        assert contents(train) == [bytes([number]) for number in range(tars._OPEN_TARS + 10)]
    if before:
        assert _num_open() <= before + tars._OPEN_TARS
