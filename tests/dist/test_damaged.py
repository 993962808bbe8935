"""Checkpoint folders that were damaged, moved or tampered with: the newest valid one is used, what was skipped and why
is said, and nothing good is deleted."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import Attempt, finished, run, tiny_config
from tests.dist.test_resume import assert_same_ending
from trainer.checkpoint import fault_of, newest_valid, step_folders

CONFIG = tiny_config(
    max_epochs=None, max_steps=9, checkpoint={"every_steps": 3, "every_epochs": None, "keep": 3},
    eval={"every_epochs": None, "batch_size": 5}, model={"name": "tests.dist.toys:WithBatchNorm"},
)  # fmt: skip
FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "rank_0.safetensors", "rank_1.safetensors",
         "state.json")  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    """A finished run of two ranks with checkpoints at 3, 6 and 9; for each test to copy."""
    attempt = finished(tmp_path_factory.mktemp("damaged") / "whole", CONFIG, 2)
    assert [path.name for path in step_folders(attempt.run_dir.checkpoints)] == [f"step_0000000{i}" for i in (3, 6, 9)]
    return attempt


def copy_of(whole: Attempt, place: Path) -> Path:
    """The run as it was before its result, elsewhere; returns its checkpoints."""
    shutil.copytree(whole.run_dir.path, place, symlinks=True)
    (place / "result.json").unlink()
    (place / "model.safetensors").unlink()
    return place / "checkpoints"


def goes_on(folder: Path, whole: Attempt, after: str, *said: str) -> str:
    """The run goes on from checkpoint `after`, says all of `said`, and ends like the whole one. Returns the log."""
    resumed = finished(folder.parent, CONFIG, 2)
    assert f"resume     {after}: " in resumed.log()
    for text in said:
        assert text in resumed.log()
    assert_same_ending(resumed, whole)
    kept = step_folders(folder)
    assert [fault_of(path) for path in kept] == [None] * len(kept)
    assert len(kept) >= 2
    return resumed.log()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def relist(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def as_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("nowhere")


def as_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file", encoding="utf-8")


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"flip {name}": (lambda path, name=name: flip(path / name), "") for name in FILES},
    **{f"cut {name}": (lambda path, name=name: halve(path / name), "") for name in FILES},
    **{f"lose {name}": (lambda path, name=name: (path / name).unlink(), f"{name} is missing") for name in FILES},
    "a folder for a file": (lambda path: as_folder(path / "model.safetensors"), "'model.safetensors' is no file of"),
    "a pipe for a file": (lambda path: as_pipe(path / "model.safetensors"), "'model.safetensors' is no file of"),
    "a file for the folder": (as_file, "it is no folder"),
    "a link to nowhere for the folder": (as_link, "it is no folder"),
    "an empty folder": (emptied, "manifest.json is missing"),
    "junk": (lambda path: (path / "manifest.json").write_bytes(b"\xff\x00{"), "manifest.json is not readable"),
    "deep JSON": (
        lambda path: (path / "manifest.json").write_text("[" * 200_000), "manifest.json is not readable: RecursionError"
    ),
    "a list": (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json is not readable"),
    "a part unlisted": (
        lambda path: relist(path, lambda listed: listed.pop("rank_1.safetensors")),
        "manifest.json does not list rank_1.safetensors of 2 ranks",
    ),
    "a device listed": (
        lambda path: relist(path, lambda listed: listed.update({"/dev/zero": {"bytes": 0, "sha256": ""}})),
        "manifest.json lists '/dev/zero', which is no file of a checkpoint",
    ),
    "a way out listed": (
        lambda path: relist(path, lambda listed: listed.update({"../x.json": {"bytes": 0, "sha256": ""}})),
        "manifest.json lists '../x.json', which is no file of a checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_found_and_named(tmp_path: Path, whole: Attempt, damage: str) -> None:
    folder = copy_of(whole, tmp_path / "run")
    hurt, told = DAMAGES[damage]
    hurt(folder / "step_00000009")
    skipped: dict[Path, str] = {}
    assert newest_valid(folder, skipped.__setitem__) == folder / "step_00000006"
    ((path, fault),) = skipped.items()
    assert path == folder / "step_00000009"
    how, _, name = damage.partition(" ")
    assert (name if name in FILES and (how, name) != ("flip", "manifest.json") else told) in fault
    assert "\n" not in fault


@pytest.mark.parametrize(
    "damage",
    [
        *("flip model.safetensors", "cut state.json", "lose rank_1.safetensors", "lose manifest.json", "deep JSON"),
        *("a file for the folder", "a link to nowhere for the folder", "an empty folder", "a pipe for a file"),
    ],
)
def test_a_run_goes_on_from_the_one_before(tmp_path: Path, whole: Attempt, damage: str) -> None:
    folder = copy_of(whole, tmp_path / "run")
    hurt, told = DAMAGES[damage]
    hurt(folder / "step_00000009")
    log = goes_on(folder, whole, "step_00000006", f"skipped {folder}/step_00000009: {told}")
    assert "kept what was skipped as damaged_step_00000009" in log
    assert os.path.lexists(folder / "damaged_step_00000009")


def test_two_damaged_ones_are_both_told(tmp_path: Path, whole: Attempt) -> None:
    folder = copy_of(whole, tmp_path / "run")
    flip(folder / "step_00000009" / "rank_1.safetensors")
    (folder / "step_00000006" / "state.json").unlink()
    log = goes_on(folder, whole, "step_00000003", "step_00000009: rank_1.saf", "step_00000006: state.json is missing")
    assert log.count("kept what was skipped") == 2


def test_a_folder_copied_to_another_machine(tmp_path: Path, whole: Attempt) -> None:
    """Another path, other times, no lock, only what checkpoints are made of, and none of the rest of the run."""
    folder = tmp_path / "somewhere" / "else" / "checkpoints"
    for path in step_folders(whole.run_dir.checkpoints)[:2]:
        (folder / path.name).mkdir(parents=True)
        for file in sorted(path.iterdir(), reverse=True):
            (folder / path.name / file.name).write_bytes(file.read_bytes())
            os.utime(folder / path.name / file.name, (0, 0))
    resumed = finished(folder.parent, CONFIG, 2)
    assert "resume     step_00000006: " in resumed.log()
    for name, tensor in whole.export().items():
        assert resumed.export()[name].equal(tensor)


def test_a_link_to_a_checkpoint_elsewhere_is_used_and_only_the_link_is_ever_removed(
    tmp_path: Path, whole: Attempt
) -> None:
    folder, elsewhere = copy_of(whole, tmp_path / "run"), tmp_path / "other disk"
    (folder / "step_00000009").rename(elsewhere)
    (folder / "step_00000009").symlink_to(elsewhere)
    goes_on(folder, whole, "step_00000009")
    longer = tiny_config(**CONFIG.model_dump(mode="json") | {"max_steps": 18})
    last = finished(folder.parent, longer, 2)
    assert not os.path.lexists(folder / "step_00000009") or last.result()["best"]["step"] == 9
    assert fault_of(elsewhere) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"name": "step_00000004"}', "skipped {0}/step_00000004, the best: best.json names it, but it is missing"),
        ('{"name": "step_00000003"}', "skipped {0}/step_00000003, the best: model.safetensors is missing"),
        ("[" * 200_000, ""),
    ],
)
def test_a_best_that_is_not_there_is_said_and_the_newest_is_evaluated(
    tmp_path: Path, whole: Attempt, content: str, said: str
) -> None:
    folder = copy_of(whole, tmp_path / "run")
    (folder / "best.json").write_text(content)
    (folder / "step_00000003" / "model.safetensors").unlink()
    evaluated = finished(folder.parent, CONFIG, 2, mode="eval", checkpoint="best")
    assert said.format(folder) in evaluated.log()
    assert "step_00000009, 2 x cpu" in evaluated.log()


def test_best_json_is_mended_by_what_the_checkpoints_know(tmp_path: Path, whole: Attempt) -> None:
    """As after a kill between the checkpoint and best.json."""
    folder = copy_of(whole, tmp_path / "run")
    assert json.loads((folder / "best.json").read_text()) == {"name": "step_00000009"}
    (folder / "best.json").write_text('{"name": "step_00000003"}')
    goes_on(folder, whole, "step_00000009")
    assert json.loads((folder / "best.json").read_text()) == {"name": "step_00000009"}


def test_a_checkpoint_made_by_something_else_is_an_error_in_one_sentence(tmp_path: Path, whole: Attempt) -> None:
    """Its hashes are right, what they are of is not."""
    folder = copy_of(whole, tmp_path / "run")
    junk = folder / "step_00000009" / "model.safetensors"
    junk.write_bytes(b"\xff" * 64)
    relist(junk.parent, lambda listed: listed.update({junk.name: facts_of(junk)}))
    assert fault_of(junk.parent) is None
    refused = run(folder.parent, CONFIG, 2)
    assert refused.statuses == [2, 2]
    assert refused.outcome().kind == "checkpoint error"
    assert f"{junk.parent} holds what is no safetensors file" in (refused.outcome().message or "")


def facts_of(path: Path) -> dict[str, Any]:
    from trainer.disk import sha256

    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
