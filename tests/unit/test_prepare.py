import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torchvision.datasets  # so slow that the worker imports it only where it is needed  # noqa: F401

from configs.data_section import DataConfig
from configs.errors import EnvironmentProblem
from trainer import prepare
from trainer.data.datasets import load_data
from trainer.prepare import EMBEDDED_MNIST, MNIST_MD5, prepare_data

CONTENT = {name: name.encode() * 100 for name in MNIST_MD5}


@pytest.fixture
def tiny_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The embedded files replaced by tiny ones."""
    folder = tmp_path / "embedded"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(prepare, "EMBEDDED_MNIST", folder)
    sums = {name: hashlib.md5(content).hexdigest() for name, content in CONTENT.items()}
    monkeypatch.setattr(prepare, "MNIST_MD5", sums)
    return folder


def config(root: Path, name: str = "mnist") -> DataConfig:
    return DataConfig(name=name, root=str(root))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_embedded_files_are_mnist() -> None:
    readme = (EMBEDDED_MNIST / "README.md").read_text(encoding="utf-8")
    for name, md5 in MNIST_MD5.items():
        assert md5 in readme
        assert hashlib.md5(gzip.decompress((EMBEDDED_MNIST / f"{name}.gz").read_bytes())).hexdigest() == md5


def test_unpacked_where_torchvision_reads_it(tmp_path: Path, tiny_mnist: Path) -> None:
    prepare_data(config(tmp_path / "data"))
    raw = tmp_path / "data" / "MNIST" / "raw"
    assert {path.name: path.read_bytes() for path in raw.iterdir()} == CONTENT
    assert names(tmp_path / "data") == [".lock", "MNIST"]


def test_second_call_touches_nothing(tmp_path: Path, tiny_mnist: Path) -> None:
    prepare_data(config(tmp_path / "data"))
    for file in tiny_mnist.iterdir():
        file.unlink()
    prepare_data(config(tmp_path / "data"))


def test_leftovers_of_a_killed_call_are_cleared(tmp_path: Path, tiny_mnist: Path) -> None:
    half = tmp_path / "data" / ".tmp-abc" / "MNIST" / "raw"
    half.mkdir(parents=True)
    (half / "train-images-idx3-ubyte").write_bytes(b"half")
    prepare_data(config(tmp_path / "data"))
    assert names(tmp_path / "data") == [".lock", "MNIST"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "data" / "MNIST" / "raw").iterdir()} == CONTENT


def flip_middle(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        flip_middle,
        lambda file: file.write_bytes(file.read_bytes()[:-9]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"no gzip at all"),
        lambda file: file.write_bytes(gzip.compress(b"other content")),
        lambda file: file.unlink(),
    ],
    ids=["flipped", "cut", "empty", "no gzip", "other content", "missing"],
)
def test_damaged_file_is_named_and_nothing_is_half_written(
    tmp_path: Path, tiny_mnist: Path, damage: Callable[[Path], object]
) -> None:
    damage(tiny_mnist / "t10k-labels-idx1-ubyte.gz")
    with pytest.raises(EnvironmentProblem, match=r"t10k-labels-idx1-ubyte.gz.*restore it"):
        prepare_data(config(tmp_path / "data"))
    assert names(tmp_path / "data") == [".lock"]


def test_every_flipped_byte_is_told(tmp_path: Path, tiny_mnist: Path) -> None:
    file = tiny_mnist / "t10k-labels-idx1-ubyte.gz"
    content = file.read_bytes()
    for place in range(10, len(content)):  # before that is the header, with a time that nobody needs
        file.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        with pytest.raises(EnvironmentProblem, match=r"t10k-labels-idx1-ubyte\.gz"):
            prepare_data(config(tmp_path / "data"))


def test_ones_own_data_set_needs_no_preparation(tmp_path: Path) -> None:
    prepare_data(config(tmp_path / "data", "some.module:data"))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_absent_data_is_told_with_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(EnvironmentProblem, match=f"{name} is not in {tmp_path}"):
        load_data(config(tmp_path, name))
