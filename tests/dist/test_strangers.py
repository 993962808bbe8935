"""A file from a stranger is at worst an error: nothing in it runs, nothing outside its folder is touched."""

import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dist.harness import Attempt, run, tiny_config
from trainer import checkpoint

CONFIG: dict[str, Any] = {"optim": {"name": "adam", "lr": 0.01}}
FILES = ("model.safetensors", "optimizer.safetensors", "rank_0.safetensors", "state.json", "manifest.json")


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint, after 8 of 16 steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    stopped = run(folder, tiny_config(**CONFIG, model={"name": "tests.dist.toys:Mortal"}), 1, {"STOP_AT": "7"})
    assert stopped.checkpoints()[-1] == "step_00000008"
    return folder


@pytest.fixture
def target(trained: Path, tmp_path: Path) -> Path:
    """A copy of its checkpoint's folder, to be attacked."""
    shutil.copytree(trained, tmp_path / "run")
    for path in (tmp_path / "run/checkpoints").glob("step_*"):
        if path.name != "step_00000008":
            shutil.rmtree(path)
    return tmp_path / "run/checkpoints/step_00000008"


def sign(folder: Path, **more: Any) -> None:
    """A manifest that is right for what lies there, and `more`."""
    files = [path for path in folder.iterdir() if path.name != "manifest.json" and path.is_file()]
    content = {path.name: path.read_bytes() for path in files}
    facts = {name: {"bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for name, b in content.items()}
    (folder / "manifest.json").write_text(json.dumps(facts | more))


def go_on(target: Path) -> Attempt:
    return run(target.parent.parent, tiny_config(**CONFIG, model={"name": "tests.dist.toys:Mortal"}))


def refused(target: Path) -> str:
    """What the run says that is to go on from the attacked checkpoint, its only one."""
    attempt = go_on(target)
    assert attempt.statuses == [2], attempt.log()
    outcome = attempt.outcome()
    assert outcome.kind == "checkpoint error"
    assert "Traceback" not in attempt.log()
    assert outcome.message is not None
    return outcome.message


def test_the_checkpoint_goes_on_if_it_is_left_alone_or_signed_anew(target: Path) -> None:
    sign(target)
    assert go_on(target).outcome().status == "done"


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_the_place_of_a_file_is_an_error_and_does_not_run(
    target: Path, tmp_path: Path, name: str, signed: bool
) -> None:
    bomb = pickle.dumps(_Bomb(tmp_path / "ran"))
    (target / name).write_bytes(bomb)
    if signed and name != "manifest.json":
        sign(target)
    refused(target)
    assert not (tmp_path / "ran").exists()
    pickle.loads(bomb)
    assert (tmp_path / "ran").exists()  # it would have


@pytest.mark.parametrize("torch_format", [False, True])
def test_a_pickle_as_initial_weights_is_an_error_and_does_not_run(tmp_path: Path, torch_format: bool) -> None:
    weights, bomb = tmp_path / "model.safetensors", _Bomb(tmp_path / "ran")
    torch.save(bomb, weights) if torch_format else weights.write_bytes(pickle.dumps(bomb))
    attempt = run(tmp_path / "run", tiny_config(init_from=str(weights)))
    assert attempt.statuses == [2]
    assert "is not a safetensors file" in (attempt.outcome().message or "")
    assert not (tmp_path / "ran").exists()


def outside(target: Path, name: str) -> None:
    """The manifest lists a file that is not in the folder, with the right hash of it."""
    secret = target.parent.parent / "secret"
    secret.write_text("secret")
    facts = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    sign(target, **{name.format(secret=secret): facts})


def link(target: Path, name: str) -> None:
    """A file is a link to one outside, with the right content."""
    place = target.parent.parent / name
    (target / name).rename(place)
    (target / name).symlink_to(place)


def write(target: Path, text: str) -> None:
    (target / "manifest.json").write_text(text)


STRANGE: list[tuple[Callable[[Path, str], None], str, str]] = [
    (outside, "../../secret", "which is no file of a checkpoint"),
    (outside, "{secret}", "which is no file of a checkpoint"),
    (outside, "a\n\x1b[2J.json", "which is no file of a checkpoint"),
    (link, "model.safetensors", "'model.safetensors' is no file of a checkpoint"),
    (link, "state.json", "'state.json' is no file of a checkpoint"),
    (lambda target, name: os.mkfifo(target / name), "pipe.json", "'pipe.json' is no file of a checkpoint"),
    (lambda target, name: os.truncate(target / name, 2**40), "state.json", "has 1,099,511,627,776 bytes"),
    (write, "[" * 100_000, "is not readable"),
    (write, "[1, 2]", ""),
    (write, '"state.json"', ""),
    (write, '{"state.json": 3}', ""),
    (write, '{"state.json": {"bytes": 1e999, "sha256": []}}', ""),
    (write, '{"state.json": {"bytes": ' + "9" * 5000 + "}}", ""),
]


@pytest.mark.parametrize("case", range(len(STRANGE)))
def test_a_strange_folder_or_manifest_is_a_fault(target: Path, case: int) -> None:
    attack, argument, said = STRANGE[case]
    attack(target, argument)
    message = refused(target)
    assert "no valid checkpoint is left" in message
    assert said in message
    assert "\x1b" not in message


def in_state(**changes: Any) -> Callable[[Path], None]:
    def attack(target: Path) -> None:
        state = json.loads((target / "state.json").read_text())
        for key, value in changes.items():
            section, _, name = key.rpartition("__")
            (state[section] if section else state)[name] = value
        (target / "state.json").write_text(json.dumps(state))

    return attack


def in_file(name: str, **tensors: Any) -> Callable[[Path], None]:
    """Put tensors into a file; None takes one out."""

    def attack(target: Path) -> None:
        found: dict[str, Any] = load_file(target / name) | {key.replace("__", "."): t for key, t in tensors.items()}
        save_file({key: tensor for key, tensor in found.items() if tensor is not None}, target / name)

    return attack


def huge_header(target: Path) -> None:
    (target / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")


def huge_tensor(target: Path) -> None:
    header = json.dumps({"head.weight": {"dtype": "F32", "shape": [2**50], "data_offsets": [0, 2**52]}}).encode()
    (target / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def without_state(target: Path) -> None:
    (target / "state.json").write_text("[]")


ATTACKS: dict[str, Callable[[Path], None]] = {
    "world size of another type": in_state(world_size="2"),
    "more ranks than files": in_state(world_size=10**9),
    "no ranks": in_state(world_size=0),
    "steps that are text": in_state(train_state__step="8"),
    "steps that do not add up": in_state(train_state__step=5),
    "steps beyond all numbers": in_state(train_state__step=10**30, train_state__batch=10**30),
    "an epoch that is a list": in_state(train_state__epoch=[1]),
    "a field that there is not": in_state(train_state__evil=1),
    "no train state": in_state(train_state=None),
    "time that is text": in_state(wall_s="long"),
    "facts that are lists": in_state(device=["\x1b[2J"]),
    "no versions": in_state(versions=3),
    "no version of torch": in_state(versions={}),
    "no account of time": in_state(time="x"),
    "an account of text": in_state(time={"compute": "x"}),
    "time that is no number": in_state(wall_s=float("nan")),
    "batches that are letters": in_state(train_state__passed_over="abc"),
    "losses that are text": in_state(train_state__recent_losses=["a"]),
    "a place before the epoch": in_state(train_state__batch_in_epoch=-3),
    "state that is a list": without_state,
    "a header without end": huge_header,
    "a tensor larger than its file": huge_tensor,
    "an optimizer of no parameter": in_file("optimizer.safetensors", evil=torch.zeros(3)),
    "weights of another shape": in_file("model.safetensors", head__weight=torch.zeros(3, 64)),
    "no loss window": in_file("rank_0.safetensors", window=None),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_checkpoint_with_right_hashes_and_wrong_content_is_an_error(target: Path, attack: str) -> None:
    ATTACKS[attack](target)
    sign(target)
    message = refused(target)
    assert str(target) in message or "no valid checkpoint is left" in message
    assert "\x1b" not in message
    assert len(message) < 600


def test_best_json_of_a_stranger_is_none(tmp_path: Path) -> None:
    for text in ("[" * 100_000, '{"name": "../../secret"}', '{"name": 3}', "[]"):
        (tmp_path / "best.json").write_text(text)
        assert checkpoint.best_name(tmp_path) is None
