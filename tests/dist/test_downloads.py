"""Data that must be fetched is fetched once, whole, and never again. The only source is a server on this machine."""

import gzip
import hashlib
import io
import os
import pickle
import signal
import struct
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, FashionMNIST

from configs.data_section import DataConfig
from configs.errors import EnvironmentProblem
from tests.dist.harness import exit_statuses, fork
from trainer.data.datasets import load_data
from trainer.prepare import prepare_data


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def tiny_fashion(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four files of six and three images, with torchvision's names and their own hashes."""
    resources = []
    for kind, size in (("train", 6), ("t10k", 3)):
        images = np.full((size, 28, 28), 7, dtype=np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", np.arange(size, dtype=np.uint8))):
            packed = gzip.compress(idx(array))
            resources.append((f"{kind}-{name}-ubyte.gz", md5(packed)))
            (files / resources[-1][0]).write_bytes(packed)
    monkeypatch.setattr(FashionMNIST, "resources", resources)


def tiny_cifar(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the archive of CIFAR-10."""
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    batches = {name: pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [3, 4]}) for name in names}
    meta = pickle.dumps({"label_names": list("abcdefghij")})
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in {**batches, "batches.meta": meta}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    (files / "cifar-10-python.tar.gz").write_bytes(packed.getvalue())
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(packed.getvalue()))
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5(batches[name])] for name in names[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5(batches["test_batch"])]])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": md5(meta)})


SOURCES: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], int, list[str]]] = {
    "fashion_mnist": (
        tiny_fashion,
        6,
        [f"{kind}-{name}-ubyte.gz" for kind in ("t10k", "train") for name in ("images-idx3", "labels-idx1")],
    ),
    "cifar10": (tiny_cifar, 10, ["cifar-10-python.tar.gz"]),
}


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Note which file was asked for."""
        with open(Path(self.directory) / ".requests", "a", encoding="ascii") as file:
            file.write(f"{self.path.rpartition('/')[2]}\n")


@dataclass
class Server:
    files: Path
    url: str
    pid: int

    def requests(self) -> list[str]:
        path = self.files / ".requests"
        return sorted(path.read_text(encoding="ascii").split()) if path.exists() else []

    def stop(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            exit_statuses([self.pid])
            self.pid = 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    files = tmp_path / "files"
    files.mkdir()
    listening = HTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(files)))

    def serve() -> int:
        listening.serve_forever()
        return 0

    running = Server(files, f"http://127.0.0.1:{listening.server_port}", fork(serve))
    listening.server_close()
    yield running
    running.stop()


def prepare(config: DataConfig, note: Path) -> Callable[[], int]:
    """What a process does: prepare and load; an error that is told to the user goes to `note`."""

    def body() -> int:
        os.environ["no_proxy"] = "*"
        try:
            prepare_data(config)
        except EnvironmentProblem as error:
            note.write_text(str(error), encoding="utf-8")
            return 3
        data = load_data(config)
        note.write_text(f"{len(data.train)} {data.num_classes}", encoding="utf-8")
        return 0

    return body


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("name", SOURCES)
def test_each_file_is_fetched_once_by_processes_that_start_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server, name: str
) -> None:
    build, size, files = SOURCES[name]
    build(server.files, monkeypatch)
    config = DataConfig(name=name, root=str(tmp_path / "data"), mirror=server.url)
    notes = [tmp_path / f"note{i}" for i in range(3)]
    assert exit_statuses([fork(prepare(config, note)) for note in notes]) == [0, 0, 0]
    assert [note.read_text() for note in notes] == [f"{size} 10"] * 3
    # By one of the three. torchvision asks twice for each file: the first time only where it is redirected to.
    assert server.requests() == sorted(2 * files)
    assert len(visible(tmp_path / "data")) == 1
    server.stop()
    assert exit_statuses([fork(prepare(config, notes[0]))]) == [0]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("fault", ["no server", "not found", "other content", "cut short"])
def test_what_cannot_be_fetched_is_told_with_the_folder_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server, name: str, fault: str
) -> None:
    build, _, files = SOURCES[name]
    build(server.files, monkeypatch)
    last = server.files / files[-1]
    if fault == "no server":
        server.stop()
    elif fault == "not found":
        last.unlink()
    elif fault == "other content":
        last.write_bytes(gzip.compress(b"something else"))
    else:
        last.write_bytes(last.read_bytes()[:-20])
    root = tmp_path / "data"
    config = DataConfig(name=name, root=str(root), mirror=server.url)
    assert exit_statuses([fork(prepare(config, tmp_path / "note"))]) == [3]
    told = (tmp_path / "note").read_text()
    assert told.startswith(f"{name} is not in {root}/")
    assert server.url in told
    assert "data.mirror" in told
    assert visible(root) == []


def test_process_that_is_killed_in_a_download_leaves_what_the_next_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    tiny_fashion(server.files, monkeypatch)
    config = DataConfig(name="fashion_mnist", root=str(tmp_path / "data"), mirror=server.url)
    original = FashionMNIST.download

    def download_and_die(self: FashionMNIST) -> None:
        original(self)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(FashionMNIST, "download", download_and_die)
        assert exit_statuses([fork(prepare(config, tmp_path / "note"))]) == [-signal.SIGKILL]
    assert [name[:5] for name in visible(tmp_path / "data")] == [".tmp-"]
    assert exit_statuses([fork(prepare(config, tmp_path / "note"))]) == [0]
    assert visible(tmp_path / "data") == ["FashionMNIST"]


class _Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def fetched(tmp_path: Path, server: Server, name: str) -> DataConfig:
    config = DataConfig(name=name, root=str(tmp_path / "data"), mirror=server.url)
    assert exit_statuses([fork(prepare(config, tmp_path / "note"))]) == [0]
    return config


@pytest.mark.parametrize("name", ["data_batch_1", "data_batch_5", "test_batch", "batches.meta"])
def test_a_pickle_in_the_place_of_cifars_is_an_error_and_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server, name: str
) -> None:
    tiny_cifar(server.files, monkeypatch)
    config = fetched(tmp_path, server, "cifar10")
    monkeypatch.setattr(
        "torchvision.datasets.cifar.check_integrity", lambda *_: True
    )  # not by torchvision's check alone
    (tmp_path / "data/cifar-10-batches-py" / name).write_bytes(pickle.dumps(_Bomb(tmp_path / "ran")))
    with pytest.raises(EnvironmentProblem, match=f"{name} is not the published file: MD5 [0-9a-f]*, expected"):
        load_data(config)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("content", ["pickle", "huge", "short"])
def test_files_in_the_place_of_mnists_are_an_error_and_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server, name: str, content: str
) -> None:
    tiny_fashion(server.files, monkeypatch)
    config = fetched(tmp_path, server, "fashion_mnist")
    file = tmp_path / "data/FashionMNIST/raw" / name
    contents = {
        "pickle": pickle.dumps(_Bomb(tmp_path / "ran")),
        "huge": struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1),
        "short": b"",
    }
    file.write_bytes(contents[content])
    with pytest.raises(EnvironmentProblem, match="or not as it was published"):
        load_data(config)
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python cannot refuse them")
@pytest.mark.parametrize("evil", ["../evil", "/{}/evil", "link", "folder link", "hard link"])
def test_an_archive_cannot_write_outside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server, evil: str
) -> None:
    """Were its hash right: one that is not is never unpacked."""
    packed, secret = io.BytesIO(), tmp_path / "secret"
    secret.write_text("mine")
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        member = tarfile.TarInfo(evil.format(tmp_path) if "evil" in evil else "cifar-10-batches-py/x")
        if evil == "folder link":
            member = tarfile.TarInfo("cifar-10-batches-py")
        if "link" in evil:
            member.type = tarfile.LNKTYPE if evil == "hard link" else tarfile.SYMTYPE
            member.linkname = str(secret if evil != "folder link" else tmp_path)
            archive.addfile(member)
        else:
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
    (server.files / "cifar-10-python.tar.gz").write_bytes(packed.getvalue())
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(packed.getvalue()))
    config = DataConfig(name="cifar10", root=str(tmp_path / "data"), mirror=server.url)
    assert exit_statuses([fork(prepare(config, tmp_path / "note"))]) == [3]
    assert (tmp_path / "note").read_text().startswith("cifar10 is not in ")
    assert secret.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "files", "note", "secret"]
    assert visible(tmp_path / "data") == []
