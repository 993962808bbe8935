"""What the proofs compare, on run folders made by hand."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from configs.errors import EXIT_DONE, EXIT_TRAINING, TrainingError
from configs.run_dir import RunDir
from launch.verify import compare
from launch.verify.resume import as_setting, draw_kills
from launch.verify.runs import Ended, a_place
from launch.verify.table import Row, Table


def ended(folder: Path, name: str = "run", output: str = "") -> Ended:
    run = RunDir(folder / name)
    (run.checkpoints / "step_00000004").mkdir(parents=True)
    (run.checkpoints / "step_00000004" / "model.safetensors").write_bytes(b"weights")
    (run.checkpoints / "step_00000004" / "state.json").write_text(json.dumps({"classes": ["a"], "wall_s": len(name)}))
    run.weights.write_bytes(b"weights")
    run.metrics.write_text(json.dumps({"step": 1, "train/loss": 0.5, "perf/images_per_sec": len(name)}) + "\n")
    samples(run, "001", 0, [(0, [1, 2]), (1, [5, 6])])
    samples(run, "001", 1, [(0, [3, 4]), (1, [7, 8])])
    log = folder / f"{name}.log"
    log.write_text(output)
    return Ended(run, EXIT_DONE, log)


def samples(run: RunDir, label: str, rank: int, batches: list[tuple[int, list[int]]]) -> None:
    path = run.attempt(label).samples(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"batch": batch, "sample_ids": ids}) + "\n" for batch, ids in batches]
    path.write_text("".join(lines))


def test_what_was_measured_by_a_clock_is_no_difference(tmp_path: Path) -> None:
    assert compare.bits(ended(tmp_path, "one"), ended(tmp_path, "another")) == []


def test_under_virtual_shards_all_ranks_hold_the_same_but_their_losses(tmp_path: Path) -> None:
    one, other = ended(tmp_path, "one"), ended(tmp_path, "other")
    for run, ranks in ((one, 1), (other, 3)):
        assert run.checkpoint is not None
        (run.checkpoint / "state.json").write_text(json.dumps({"virtual_shards": 4, "world_size": ranks}))
        for rank in range(ranks):
            tensors = {"mean": np.float32([1, 2]), "window": np.float64(5 * (rank == 0))}
            save_file({k: np.asarray(v) for k, v in tensors.items()}, run.checkpoint / f"rank_{rank}.safetensors")
    assert compare.bits(one, other) == []
    save_file({"mean": np.float32([1, 3]), "window": np.zeros(())}, other.run.checkpoints / PLACE)
    assert compare.bits(one, other) == [f"{PLACE}: mean is not that of rank_0.safetensors"]


PLACE = "step_00000004/rank_2.safetensors"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("checkpoints/step_00000004/model.safetensors", "other", "step_00000004/model.safetensors differs"),
        ("checkpoints/step_00000004/rank_1.safetensors", "more", "step_00000004/rank_1.safetensors differs"),
        ("checkpoints/step_00000004/state.json", '{"classes": ["b"]}', "state.json: classes differs"),
        ("model.safetensors", "other", "model.safetensors differs"),
        ("metrics.jsonl", '{"step": 1, "train/loss": 0.6}', "metrics.jsonl: train/loss at step 1 is 0.5 and 0.6"),
        ("metrics.jsonl", "", "metrics.jsonl has 1 and 0 points"),
        ("attempts/001/samples-rank1.jsonl", '{"batch": 0, "sample_ids": [3, 9]}', "the samples of batch 0 differ"),
    ],
)
def test_every_difference_is_found_and_named(tmp_path: Path, file: str, content: str, said: str) -> None:
    one, other = ended(tmp_path, "one"), ended(tmp_path, "other")
    (other.run.path / file).write_text(content)
    assert said in compare.bits(one, other)


def test_samples_are_joined_over_ranks_and_attempts(tmp_path: Path) -> None:
    one = ended(tmp_path)
    # Killed in batch 1, of which rank 1 had not written its line; the second attempt began at batch 1.
    samples(one.run, "001", 1, [(0, [3, 4])])
    samples(one.run, "002", 0, [(1, [5, 6]), (2, [9])])
    samples(one.run, "002", 1, [(1, [7, 8]), (2, [10])])
    assert one.samples() == ({0: [1, 2, 3, 4], 1: [5, 6, 7, 8], 2: [9, 10]}, [])


def test_a_replay_with_other_samples_is_found(tmp_path: Path) -> None:
    one = ended(tmp_path)
    samples(one.run, "002", 0, [(0, [1, 2, 3, 5]), (1, [5, 6, 7, 8])])
    assert one.samples()[1] == [0]
    assert compare.samples(one, one) == ["batch 0 had other samples when it was replayed"]


def test_of_a_batch_trained_on_twice_in_one_attempt_the_last_line_counts(tmp_path: Path) -> None:
    one = ended(tmp_path)
    samples(one.run, "001", 0, [(0, [1, 2]), (1, [5, 6]), (0, [1, 2])])
    assert one.samples()[0][0] == [1, 2, 3, 4]


def test_a_checkpoint_that_was_announced_must_be_there(tmp_path: Path) -> None:
    assert ended(tmp_path, "a", "saved step_00000002\nsaved step_00000004\n").lost() == []
    assert ended(tmp_path, "b", "saved step_00000005\n").lost() == ["step_00000005 was announced as saved and is gone"]
    assert ended(tmp_path, "c", "not saved step_00000009\n").lost() == []


def test_kills_are_seeded_in_order_and_within_the_run() -> None:
    nprocs = [4, 1, 2, 4] * 5
    kills = draw_kills(random.Random(5), 20, nprocs)
    assert kills == draw_kills(random.Random(5), 20, nprocs)
    assert [step for _, _, step in kills] == sorted(step for _, _, step in kills)
    assert {kind for kind, _, _ in kills} == {"sigkill", "sigkill_in_save"}
    assert all(0 <= rank < nproc and 0 <= step < 20 for (_, rank, step), nproc in zip(kills, nprocs, strict=True))
    assert {rank for _, rank, _ in kills} == {0, 1, 2, 3}
    with pytest.raises(TrainingError, match="a run of 1 step cannot be killed within"):
        draw_kills(random.Random(5), 1, [1])
    assert as_setting([("sigkill", 1, 7)]) == "faults=[{kind: sigkill, rank: 1, step: 7, attempt: 1}]"


def test_the_table_holds_only_if_every_row_does(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("fault")
    table.add(Row("one", "a", "b"))
    assert table.conclude() == EXIT_DONE
    table.add(Row("two", "a", "c", ["why"]))
    assert table.conclude() == EXIT_TRAINING
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "| ----- | -------- | -------- | ----- |",
        "| one   | a        | b        | yes   |",
        "| two   | a        | c        | no    |",
        "1 of 2 hold",
    ]


@pytest.mark.parametrize("keep", [False, True])
def test_the_runs_of_a_proof_that_failed_are_kept(tmp_path: Path, keep: bool) -> None:
    with a_place(tmp_path / "x.yaml", tmp_path / "runs", (), has_own_interval=False) as place:
        place.keep = keep
    assert len(list((tmp_path / "runs").iterdir())) == keep


def test_checkpoints_are_made_frequent_unless_the_user_says_how_frequent(tmp_path: Path) -> None:
    settings: dict[bool, Any] = {}
    for own in (False, True):
        with a_place(tmp_path / "x.yaml", tmp_path / "runs", (), has_own_interval=own) as place:
            settings[own] = (place.frequent_checkpoints(80), place.frequent_checkpoints(3))
    assert settings == {False: (["checkpoint.every_steps=10"], ["checkpoint.every_steps=1"]), True: ([], [])}
