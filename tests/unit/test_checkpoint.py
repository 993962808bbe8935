import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from configs.errors import CheckpointError
from tests.checkpoints import alone, save, snapshot
from trainer import checkpoint
from trainer.checkpoint import Loaded


def unexpected(path: Path, fault: str) -> None:
    pytest.fail(f"{path}: {fault}")


def saved(folder: Path, *steps: int, keep: int = 9, best: int | None = None) -> list[Path]:
    return [save(alone(), folder, snapshot(step), keep, is_best=step == best) for step in steps]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 7)
    loaded = checkpoint.load(path)
    assert path.name == loaded.name == "step_00000007"
    assert checkpoint.fault_of(path) is None
    assert loaded.state == {"world_size": 1, "note": "é", "step": 7, "format": checkpoint.FORMAT}
    for found, wanted in ((loaded.shared["model"], snapshot(7).shared["model"]), (loaded.ranks[0], snapshot(7).own)):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[k], wanted[k]) and found[k].dtype == wanted[k].dtype for k in wanted)
    assert loaded.shared["optimizer"] == {}


def test_only_tensors_and_json_lie_there(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 7)
    assert names(path) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "rank_0.safetensors",
        "state.json",
    ]
    assert names(tmp_path) == ["step_00000007"]


def test_every_flipped_byte_is_a_fault(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 1)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), max(1, len(content) // 20)):
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert checkpoint.fault_of(path) is not None, f"{file.name} byte {place}"
        file.write_bytes(content)
    assert checkpoint.fault_of(path) is None


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: cut_in_half(path / "model.safetensors"), r"model.safetensors has \d+ of \d+ bytes"),
        (lambda path: cut_in_half(path / "state.json"), r"state.json has \d+ of \d+ bytes"),
        (lambda path: cut_in_half(path / "manifest.json"), "manifest.json is not readable"),
        (lambda path: (path / "manifest.json").write_text("{}"), "manifest.json does not list state.json"),
        (lambda path: (path / "manifest.json").write_text('{"state.json": 3}'), "manifest.json is not readable"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "rank_0.safetensors").unlink(), "rank_0.safetensors is missing"),
        (lambda path: (path / "optimizer.safetensors").write_bytes(b""), r"optimizer.safetensors has 0 of \d+ bytes"),
    ],
)
def test_newest_valid_one_wins_and_what_was_skipped_is_told(
    tmp_path: Path, damage: Callable[[Path], object], told: str
) -> None:
    older, newer = saved(tmp_path, 5, 10)
    damage(newer)
    skipped: list[tuple[Path, str]] = []
    assert checkpoint.newest_valid(tmp_path, lambda path, fault: skipped.append((path, fault))) == older
    ((path, fault),) = skipped
    assert path == newer
    assert re.search(told, fault)


def test_names_that_only_resemble_a_checkpoint_are_none(tmp_path: Path) -> None:
    (good,) = saved(tmp_path, 5)
    junk = ["best_step_00000100", "step_1", "step_0000010", "step_00000100.bak", ".tmp_step_00000100", "step_0000010x"]
    for name in junk:
        shutil.copytree(good, tmp_path / name)
    assert checkpoint.step_folders(tmp_path) == [good]
    assert checkpoint.newest_valid(tmp_path, unexpected) == good


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    paths = saved(tmp_path, 99_999_999, 100_000_000, 2)
    assert checkpoint.step_folders(tmp_path) == [paths[2], paths[0], paths[1]]


def test_no_folder_and_no_checkpoint_are_none(tmp_path: Path) -> None:
    assert checkpoint.newest_valid(tmp_path / "nowhere", unexpected) is None
    assert checkpoint.newest_valid(tmp_path, unexpected) is None
    assert checkpoint.best_name(tmp_path) is None


@pytest.mark.parametrize(
    ("best", "left"),
    [(None, [4, 5]), (1, [1, 4, 5]), (4, [4, 5]), (5, [4, 5])],
)
def test_the_newest_and_the_best_are_kept(tmp_path: Path, best: int | None, left: list[int]) -> None:
    saved(tmp_path, 1, 2, 3, 4, 5, keep=2, best=best)
    assert [path.name for path in checkpoint.step_folders(tmp_path)] == [f"step_{step:08d}" for step in left]
    assert checkpoint.best_name(tmp_path) == (None if best is None else f"step_{best:08d}")


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"name": 3}', '{"name": "../../etc"}', '{"name": "step_1"}'])
def test_damaged_best_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.json").write_text(text)
    assert checkpoint.best_name(tmp_path) is None


def test_same_step_again_replaces_the_old_one(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6)
    save(alone(), tmp_path, snapshot(6, value=9.0), 2)
    assert names(tmp_path) == ["step_00000003", "step_00000006"]
    assert float(checkpoint.load(tmp_path / "step_00000006").shared["model"]["w"][0, 0]) == 9.0


def test_what_killed_saves_left_behind_is_cleared_at_the_next_start(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step_00000001").rename(tmp_path / ".tmp_step_00000005")  # was being written
    (tmp_path / "step_00000002").rename(tmp_path / ".tmp_old_step_00000002")  # was being deleted
    (tmp_path / "step_00000003").rename(tmp_path / ".old_step_00000004")  # was replaced
    (tmp_path / ".tmp_step_00000006").write_text("a file")
    (tmp_path / ".tmp_step_00000007").symlink_to(tmp_path / "step_00000004")
    checkpoint.recover(tmp_path, unexpected)
    assert names(tmp_path) == ["step_00000004"]
    assert checkpoint.load(tmp_path / "step_00000004").state["step"] == 4


@pytest.mark.parametrize("state", ["missing", "damaged", "whole"])
def test_a_replacement_cut_short_is_finished_or_undone(tmp_path: Path, state: str) -> None:
    old, new = saved(tmp_path, 1, 2)
    old.rename(tmp_path / ".old_step_00000002")
    if state == "missing":
        shutil.rmtree(new)
    if state == "damaged":
        (new / "manifest.json").unlink()
    skipped: dict[Path, str] = {}
    checkpoint.recover(tmp_path, skipped.__setitem__)
    assert checkpoint.load(new).state["step"] == (2 if state == "whole" else 1)
    assert skipped == ({new: "manifest.json is missing"} if state == "damaged" else {})
    assert names(tmp_path) == [*(["damaged_step_00000002"] if state == "damaged" else []), "step_00000002"]


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 1)
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    (path / "state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(CheckpointError, match=r"format 99 and this version reads format 1"):
        checkpoint.load(path)


def two_ranks() -> Loaded:
    ranks = [
        {"mean": torch.tensor([1.0, 2.0]), "seen": torch.tensor(4), "window": torch.tensor(10.0)},
        {"mean": torch.tensor([3.0, 6.0]), "seen": torch.tensor(5), "window": torch.tensor(0.5)},
    ]
    return Loaded("step_00000001", {}, ranks, {})


@pytest.mark.parametrize("rank", [0, 1])
def test_same_world_size_gives_each_rank_its_own(rank: int) -> None:
    loaded = two_ranks()
    assert checkpoint.merged_own(loaded, rank, 2, ("window",)) is loaded.ranks[rank]


@pytest.mark.parametrize(("rank", "world", "window"), [(0, 1, 10.5), (0, 3, 10.5), (1, 3, 0.0), (2, 3, 0.0)])
def test_another_world_size_gets_averages_and_the_sums_once(rank: int, world: int, window: float) -> None:
    merged = checkpoint.merged_own(two_ranks(), rank, world, ("window",))
    assert merged["mean"].tolist() == [2.0, 4.0]
    assert merged["seen"].item() == 4
    assert merged["window"].item() == window


def test_ranks_that_virtual_shards_kept_equal_are_not_averaged() -> None:
    alike = {"mean": torch.tensor([1.0, float("nan")]), "seen": torch.tensor(4)}
    ranks = [alike | {"window": torch.tensor(10.0)}, alike | {"window": torch.tensor(0.0)}]
    loaded = Loaded("step_00000001", {}, ranks, {"virtual_shards": 4})
    assert checkpoint.merged_own(loaded, 0, 4, ("window",))["seen"].item() == 4
    ranks[1]["seen"] = torch.tensor(5)
    with pytest.raises(CheckpointError, match=r"step_00000001: seen differs between its ranks, .* earlier checkpoint"):
        checkpoint.merged_own(loaded, 0, 2, ("window",), alike=True)


def test_same_tensors_fit() -> None:
    checkpoint.check_fits({"a": (1,), "b": ()}, {"b": (), "a": (1,)}, Path("x"))


def test_another_architecture_is_told_with_at_most_five_tensors() -> None:
    wanted = {"same": (2, 2), "shape": (3, 4), "new": (1,)} | {f"new{i}": (1,) for i in range(4)}
    found = {"same": (2, 2), "shape": (5, 4), "old": (1,)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_fits(wanted, found, Path("runs/x"))
    text = str(caught.value)
    assert text.startswith("runs/x is of another architecture: old: the model has no such tensor; ")
    assert "new: the checkpoint has no such tensor" in text
    assert text.count(";") == 5
    assert "(and 2 more)" in text
    with pytest.raises(CheckpointError, match=r"shape: \[5, 4\] in the checkpoint, \[3, 4\] in the model"):
        checkpoint.check_fits({"shape": (3, 4)}, {"shape": (5, 4)}, Path("runs/x"))
