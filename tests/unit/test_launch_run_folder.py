"""Names, locks and the decision whether a run may go on."""

import json
import os
from pathlib import Path

import pytest

from configs.errors import ConfigError, EnvironmentProblem
from configs.loader import dump_config, load_config
from configs.run_dir import RunDir, commit_settings, step_name
from configs.schema import RunConfig
from launch import run_folder
from launch.restart import Failure, Restart
from launch.run_folder import NameRequest
from launch.runs_table import render_runs

CONFIG = RunConfig(max_epochs=2, global_batch_size=8)


def started(runs: Path, name: str, config: RunConfig = CONFIG) -> RunDir:
    run = RunDir(runs / name)
    run.path.mkdir(parents=True)
    run.config.write_text(dump_config(config))
    return run


@pytest.mark.parametrize(
    ("existing", "request_", "expected"),
    [
        ([], NameRequest("mnist"), "mnist-001"),
        (["mnist-001", "mnist-007", "mnist-x", "other-099"], NameRequest("mnist"), "mnist-008"),
        (["mnist-999"], NameRequest("mnist"), "mnist-1000"),
        ([], NameRequest("my config (2)"), "my-config--2--001"),
        ([], NameRequest("mnist", "a"), "a"),
        (["a"], NameRequest("mnist", "a"), "a"),
        ([], NameRequest("mnist", "a", fresh=True), "a"),
        (["a"], NameRequest("mnist", "a", fresh=True), "a-2"),
        (["a", "a-2", "a-5"], NameRequest("mnist", "a", fresh=True), "a-6"),
    ],
)
def test_names(tmp_path: Path, existing: list[str], request_: NameRequest, expected: str) -> None:
    for name in existing:
        (tmp_path / name).mkdir()
    assert run_folder.choose_name(tmp_path, request_) == expected
    assert run_folder.claim_name(tmp_path, request_).name == expected
    assert (tmp_path / expected).is_dir()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a b", "-x"])
def test_a_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not usable"):
        run_folder.choose_name(tmp_path, NameRequest("mnist", name))


def test_a_claimed_name_is_nobody_elses(tmp_path: Path) -> None:
    names = [run_folder.claim_name(tmp_path, NameRequest("mnist")).name for _ in range(3)]
    assert names == ["mnist-001", "mnist-002", "mnist-003"]


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(EnvironmentProblem, match="is a file"):
        run_folder.claim_name(tmp_path, NameRequest("mnist", "a"))


def test_the_lock_keeps_a_second_launch_out_and_names_the_first(tmp_path: Path) -> None:
    run = started(tmp_path, "a")
    with run_folder.locked(run):
        assert run_folder.is_running(run)
        with (
            pytest.raises(ConfigError, match=rf"in use by another launch \(pid {os.getpid()}\)"),
            run_folder.locked(run),
        ):
            pass
        with run_folder.locked(run, node_rank=1):
            pass
    assert not run_folder.is_running(run)
    with run_folder.locked(run):
        pass


def test_changed_settings_are_listed_and_need_leave(tmp_path: Path) -> None:
    run = started(tmp_path, "a")
    changed = RunConfig.model_validate({"max_epochs": 3, "global_batch_size": 8, "optim": {"lr": 0.2}})
    assert len(run_folder.check_settings(run, changed, allow_changes=False)) == 2  # no checkpoint: nothing is at stake
    (run.checkpoints / step_name(1)).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"(?s)max_epochs: 2 -> 3.*lr: 0.1 -> 0.2.*--allow-changes"):
        run_folder.check_settings(run, changed, allow_changes=False)
    assert len(run_folder.check_settings(run, changed, allow_changes=True)) == 2
    free = RunConfig.model_validate({"max_epochs": 2, "global_batch_size": 8, "log": {"every_steps": 1}})
    assert run_folder.check_settings(run, free, allow_changes=False) == []


def test_the_config_is_written_once_and_other_settings_wait_for_the_ranks(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    attempt = run_folder.make_attempt(run)
    run_folder.record_settings(run, attempt, CONFIG, changed=False)
    first = run.config.read_text()
    longer = RunConfig(max_epochs=9, global_batch_size=8)
    run_folder.record_settings(run, attempt, longer, changed=False)
    assert run.config.read_text() == first
    run.result.write_text(json.dumps({"status": "finished"}))
    assert run_folder.finished_result(run)
    commit_settings(run, attempt)  # that brought no other ones
    run_folder.record_settings(run, attempt, longer, changed=True)
    assert run.config.read_text() == first
    assert run_folder.finished_result(run)
    commit_settings(run, attempt)
    assert load_config(run.config).config == longer
    assert run_folder.finished_result(run) is None
    assert (attempt.path / "result-before.json").is_file()


def test_the_newest_checkpoint_is_known_by_its_name(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    assert run_folder.newest_step(run) is None
    names = (step_name(9), step_name(123456789), ".tmp_step_9999999999", "step_12", "step_00000009.damaged")
    for name in names:
        (run.checkpoints / name).mkdir(parents=True)
    assert run_folder.newest_step(run) == 123456789


def test_attempts_are_numbered_by_kind_and_node(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    made = [
        run_folder.make_attempt(run, prefix=prefix, node_rank=node)
        for prefix, node in (("", 0), ("", 0), ("", 1), ("eval-", 0), ("", 0))
    ]
    assert [attempt.path.name for attempt in made] == ["001", "002", "001-node1", "eval-001", "003"]
    made[-1].plan.write_text(json.dumps({"local_world_size": 4}))
    made[3].plan.write_text(json.dumps({"local_world_size": 1}))
    assert run_folder.last_plan(run)["local_world_size"] == 4


def test_what_fits_in_memory_is_remembered_until_it_is_deleted(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run_folder.remembered_micro_batch(run) is None
    run_folder.remember_micro_batch(run, 4, "attempt 001 ran out of memory with 8")
    assert run_folder.remembered_micro_batch(run) == 4
    for junk in ("", "[]", '{"max_micro_batch": 0}', '{"max_micro_batch": "4"}', '{"max_micro_batch": null}'):
        run.micro_batch.write_text(junk)
        assert run_folder.remembered_micro_batch(run) is None


def test_a_restart_is_settled_by_the_checkpoint_that_the_ranks_found_valid(tmp_path: Path) -> None:
    attempt = run_folder.make_attempt(RunDir(tmp_path / "a"))
    failure = Failure("killed", "killed", 1, 9)
    expected = Restart("001", failure, 8, 1.0)
    assert run_folder.settle_restart(expected, attempt) == expected  # it ended before it could go on
    for resumed, step, replayed in (
        ({"checkpoint": step_name(6), "step": 6}, 6, 3),
        ({"checkpoint": None, "step": 0}, None, 9),
    ):
        attempt.resumed.write_text(json.dumps(resumed))
        assert run_folder.settle_restart(expected, attempt).checkpoint_step == step
        facts = json.loads(attempt.restart.read_text())
        assert (facts["checkpoint_step"], facts["steps_replayed"]) == (step, replayed)


def test_an_unknown_run_lists_the_known_ones(tmp_path: Path) -> None:
    started(tmp_path, "mnist-001")
    with pytest.raises(ConfigError, match=r"no run 'mnist-002' in .*; there are mnist-001"):
        run_folder.find_run(tmp_path, "mnist-002")
    assert run_folder.find_run(tmp_path, f"{tmp_path}/mnist-001").name == "mnist-001"


def test_the_table_of_runs_survives_junk(tmp_path: Path) -> None:
    assert render_runs(tmp_path / "none").startswith("no runs in")
    done = started(tmp_path, "done-001")
    done.result.write_text(
        json.dumps({"status": "finished", "step": 1175, "metrics": {"eval/top1": 0.9945}, "wall_s": 91.234})
    )
    junk = started(tmp_path, "junk-001")
    junk.result.write_text("{not json")
    attempt = run_folder.make_attempt(junk)
    attempt.outcome(0).write_text("[]")
    attempt.outcome(1).write_text('{"rank": 1}')
    run_folder.record_verdict(attempt, ["FAILED: rank 0: boom", "log: nowhere"])
    (junk.checkpoints / "step_00000040").mkdir(parents=True)
    (junk.checkpoints / "step_what").mkdir()
    (tmp_path / "a file").write_text("")
    (tmp_path / "empty").mkdir()
    with run_folder.locked(started(tmp_path, "now-001")):
        rows = {line.split()[0]: line.split() for line in render_runs(tmp_path).splitlines()}
    assert rows["done-001"] == ["done-001", "finished", "1175", "99.45", "%", "91.2", "s"]
    assert rows["junk-001"] == ["junk-001", "killed", "40", "rank", "0:", "boom"]
    assert rows["now-001"] == ["now-001", "running"]
    assert rows["empty"] == ["empty", "not", "started"]
    assert len(rows) == 5


def test_a_link_to_nowhere_in_the_place_of_attempts_is_told(tmp_path: Path) -> None:
    run = started(tmp_path, "a")
    (run.path / "attempts").symlink_to(tmp_path / "nowhere")
    with pytest.raises(EnvironmentProblem, match=r"cannot make .*attempts"):
        run_folder.make_attempt(run)


def test_the_name_from_a_long_config_can_be_resumed(tmp_path: Path) -> None:
    name = run_folder.choose_name(tmp_path, run_folder.NameRequest("x" * 120))
    assert run_folder.checked_run_name(name) == name
