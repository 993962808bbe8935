import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.run_dir import RunDir
from trainer.tracking import NullTracker, Tracker


def steps_in_lines(run_dir: RunDir) -> list[int]:
    return [json.loads(line)["step"] for line in run_dir.metrics.read_text(encoding="utf-8").splitlines()]


def event_files(run_dir: RunDir) -> list[str]:
    return sorted(str(path.relative_to(run_dir.path)) for path in run_dir.path.rglob("events*"))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_values_are_the_same_in_both_files(run_dir: RunDir) -> None:
    tracker = Tracker(run_dir, 0)
    tracker.log(1, {"train/loss": 0.5, "optim/lr": 0.25})
    tracker.log(2, {"train/loss": 0.125})
    tracker.close()
    lines = [json.loads(line) for line in run_dir.metrics.read_text(encoding="utf-8").splitlines()]
    assert lines == [{"step": 1, "train/loss": 0.5, "optim/lr": 0.25}, {"step": 2, "train/loss": 0.125}]
    events = EventAccumulator(str(run_dir.path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.125)]
    assert [(e.step, e.value) for e in events.Scalars("optim/lr")] == [(1, 0.25)]
    assert len(event_files(run_dir)) == 1


def test_nothing_is_written_before_the_first_point(run_dir: RunDir) -> None:
    Tracker(run_dir, 0).close()
    assert event_files(run_dir) == []


def test_later_points_of_an_earlier_attempt_are_dropped(run_dir: RunDir) -> None:
    run_dir.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4)))
    tracker = Tracker(run_dir, 2)
    tracker.log(3, {"x": 1.0})
    tracker.close()
    assert steps_in_lines(run_dir) == [1, 2, 3]


@pytest.mark.parametrize("rest", ['{"st', "", "\n"])
def test_damaged_last_line_is_dropped(run_dir: RunDir, rest: str) -> None:
    run_dir.metrics.write_text('{"step": 1}\n{"step": 2}\n' + rest)
    tracker = Tracker(run_dir, 5)
    tracker.log(6, {"x": 1.0})
    tracker.close()
    assert steps_in_lines(run_dir) == [1, 2, 6]


def test_settings_and_hparams_are_in_the_same_run(run_dir: RunDir) -> None:
    tracker = Tracker(run_dir, 0, "as it was")
    tracker.log(1, {"eval/top1": 0.5})
    tracker.log_hparams({"optim.lr": 0.1, "model.name": "mlp", "drop_last": False}, {"eval/top1": 0.5})
    tracker.close()
    assert len(event_files(run_dir)) == 1
    events = EventAccumulator(str(run_dir.path))
    events.Reload()
    assert "_hparams_/session_start_info" in events.PluginTagToContent("hparams")
    assert events.Tensors("config/text_summary")[0].tensor_proto.string_val == [b"```\nas it was\n```"]
    assert [(e.step, e.value) for e in events.Scalars("eval/top1")] == [(1, 0.5)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    tracker = NullTracker()
    tracker.log(1, {"x": 1.0})
    tracker.log_hparams({}, {})
    tracker.flush()
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_is_not_finite_is_null_in_the_lines(run_dir: RunDir) -> None:
    tracker = Tracker(run_dir, 0)
    tracker.log(1, {"eval/loss": float("nan"), "train/loss": 1.0})
    tracker.close()
    assert run_dir.metrics.read_text() == '{"step": 1, "eval/loss": null, "train/loss": 1.0}\n'
