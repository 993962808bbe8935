"""The comparisons with peers, without the peers: rows, answers, and the environments that they are installed in."""

from pathlib import Path

import pytest
from PIL import Image

from benchmarks import environments, frameworks, jpegs
from benchmarks.frameworks import Epoch
from benchmarks.mnist import goal_row
from benchmarks.turns import InTurn


def test_the_fastest_peer_is_that_of_each_round() -> None:
    measured = {
        "Lockstep": [Epoch(1.0, 60.0, 0.7), Epoch(1.0, 60.0, 0.8)],
        "slow at first": [Epoch(2.0, 5.0, 0.7), Epoch(4.0, 15.0, 0.8)],
        "slow later": [Epoch(2.0, 10.0, 0.7), Epoch(2.0, 5.0, 0.8)],
    }
    rows = {row.key: row for row in frameworks.rows_of(measured)}
    assert rows["frameworks/steady"].value == 5.0  # of 60/10 and 60/15
    assert rows["frameworks/slow at first"].value == 8.0  # of 60/5 and 60/15
    assert rows["frameworks/slow at first-start"].value == 0.375
    assert rows["frameworks/slow later-top1"].is_met


def test_the_answer_of_a_peer_is_found_in_what_it_prints() -> None:
    assert frameworks.answered_top1('epoch 0\n{"top1": 0.5}\na warning') == 0.5


def test_time_to_an_accuracy_needs_the_accuracy_of_every_run() -> None:
    assert goal_row([0.995, 0.996], [0.994, 0.995]).is_met
    assert not goal_row([0.995, 0.996], [0.9939, 0.995]).is_met


def test_peers_are_not_installed_beside_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments.importlib.metadata, "version", lambda name: "2.14.1+cpu")
    environments.check_shared("torch==2.14.1\ntorchvision==2.14.1\n")
    with pytest.raises(environments.NotInstallable, match=r"torchvision is 2\.14\.1 here, the peers' pin is 0\.29\.1"):
        environments.check_shared("torch==2.14.1\ntorchvision==0.29.1\n")


@pytest.fixture
def venvs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No environment yet; the peers' requirements and the pins are files of the test's own."""
    (tmp_path / "peer.txt").write_text("peer==1\n")
    (tmp_path / "pins.txt").write_text("torch==1\n")
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(environments, "PEERS", tmp_path)
    monkeypatch.setattr(environments, "PINS", tmp_path / "pins.txt")
    monkeypatch.setattr(environments, "VENVS", tmp_path / "venvs")
    monkeypatch.setattr(environments, "check_shared", lambda pins: None)
    return tmp_path / "venvs"


def test_an_environment_is_made_once_and_anew_where_a_pin_changes(venvs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(environments, "make", lambda peer, venv: made.append(peer) or venv.mkdir(parents=True))
    for _ in range(2):
        assert environments.python_for("peer") == str(venvs / "peer/bin/python")
    assert made == ["peer"]
    (venvs.parent / "peer.txt").write_text("peer==2\n")
    environments.python_for("peer")
    assert made == ["peer"] * 2


def test_a_peer_that_cannot_be_installed_says_why_and_is_tried_again(
    venvs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failed:
        returncode = 1
        stderr = "ERROR: No matching distribution found for peer==1\n[notice] a new release of pip\n"

    monkeypatch.setattr(environments.subprocess, "run", lambda *_, **__: Failed)
    for _ in range(2):
        with pytest.raises(environments.NotInstallable, match=r"No matching distribution found for peer==1$"):
            environments.python_for("peer")


def test_one_peer_that_is_missing_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise environments.NotInstallable(f"no network for {name}")

    monkeypatch.setattr(frameworks, "prepare_data", lambda config: None)
    monkeypatch.setattr(frameworks.environments, "python_for", missing)
    monkeypatch.setattr(frameworks, "lockstep_epoch", lambda folder, seed: Epoch(1.0, 60.0, 0.7))
    monkeypatch.setattr(frameworks, "peer_epoch", lambda folder, peer, python, seed: Epoch(1.0, 10.0, 0.7))
    rows = {row.key: row for row in frameworks.measure(1)}
    assert rows["frameworks/steady"].result == "not measured: Lightning, timm could not be installed"
    assert rows["frameworks/Accelerate"].value == 6.0
    assert rows["frameworks/Lightning"].result == "not measured: no network for lightning"


def test_pins_that_two_peers_share_are_the_same() -> None:
    pins: dict[str, str] = {}
    for path in [environments.PINS, *environments.PEERS.glob("*.txt")]:
        for line in path.read_text().splitlines():
            name, found, version = line.partition("==")
            if found:
                assert pins.setdefault(name, version) == version, path


COUNTS = """
from benchmarks.turns import answer_in_turn
numbers = iter([1.5, 2.5])
print("not an answer")
answer_in_turn(lambda: [next(numbers), 0])
"""


def test_a_process_measures_when_it_is_its_turn() -> None:
    with InTurn(["-c", COUNTS], {}) as process:
        assert process.measure() == [1.5, 0]
        assert process.measure() == [2.5, 0]
        with pytest.raises(RuntimeError, match="ended with 1 before it had measured"):
            process.measure()


def test_photographs_are_many_of_a_few_and_the_same_each_time(tmp_path: Path) -> None:
    originals = [tmp_path / f"{name}.png" for name in ("wide", "high")]
    for path, size in zip(originals, ((900, 500), (400, 700)), strict=True):
        Image.effect_noise(size, 90).convert("RGB").save(path)
    for name in ("one", "other"):
        jpegs.make(originals, tmp_path / name, 5)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.jpg"))
    assert [str(path) for path in files] == [
        *("train/high/00001.jpg", "train/high/00003.jpg", "train/wide/00000.jpg", "train/wide/00002.jpg"),
        *("train/wide/00004.jpg", "val/high/00005.jpg", "val/wide/00006.jpg"),
    ]
    contents = [(tmp_path / "one" / path).read_bytes() for path in files]
    assert len(set(contents)) == len(contents)
    assert contents == [(tmp_path / "other" / path).read_bytes() for path in files]
    for path in files:
        with Image.open(tmp_path / "one" / path) as image:
            assert image.size == (500, 375)
