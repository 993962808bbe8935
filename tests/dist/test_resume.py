"""Killed and gone on from the newest checkpoint; also on another number of processes."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import RunConfig
from tests import splitmix
from tests.dist.harness import Attempt, finished, run, tiny_config, wait_for
from tests.dist.test_any_world_size import ids_read
from trainer import checkpoint, facts, summary


def killed(path: Path, config: RunConfig, world_size: int, at: int, more: dict[str, str] | None = None) -> Attempt:
    """An attempt whose last rank is killed in training forward pass `at`, counted from 0 in this attempt."""
    environment = {"DIE_AT": str(at), "DIE_RANK": str(world_size - 1)} | (more or {})
    attempt = run(path, config, world_size, environment)
    assert attempt.statuses[-1] == -signal.SIGKILL
    return attempt


def assert_same_ending(ours: Attempt, theirs: Attempt) -> None:
    """Bit for bit: weights, averages, each rank's own tensors, optimizer, counters, and every logged value."""
    assert ours.export().keys() == theirs.export().keys()
    assert all(torch.equal(tensor, ours.export()[name]) for name, tensor in theirs.export().items())
    left, right = ours.checkpoint(), theirs.checkpoint()
    for found, wanted in zip([*left.ranks, *left.shared.values()], [*right.ranks, *right.shared.values()], strict=True):
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(found[name], wanted[name]), name
    assert left.state["train_state"] == right.state["train_state"]
    assert ours.lines() == theirs.lines()


ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 1.0}
COSINE = {"name": "cosine", "warmup_steps": 3}


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, {"model": {"name": "tests.dist.toys:WithDropout"}}),
        (1, {"model": {"name": "tests.dist.toys:WithBatchNorm"}, "ema__half_life_samples": 40.0}),
        (2, {"model": {"name": "tests.dist.toys:WithDropout"}, "max_per_device_batch_size": 2}),
        (2, {"model": {"name": "tests.dist.toys:WithBatchNorm"}, "ema__half_life_samples": 40.0}),
        (3, {"model": {"name": "tests.dist.toys:WithDropout"}, "ema__half_life_samples": 40.0}),
        (3, {"model": {"name": "tests.dist.toys:WithBatchNorm"}, "optim": {"name": "sgd", "momentum": 0.9}}),
        (2, {"model": {"name": "tests.dist.toys:WithDropout"}, "mixed_precision": "fp16"}),
        (2, {"optim": {"name": "muon", "lr": 0.01, "momentum": 0.9}, "model": {"name": "tests.dist.toys:WithDropout"}}),
        (1, {"optim": {"name": "rmsprop", "momentum": 0.9}, "model": {"name": "tests.dist.toys:WithDropout"}}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(str(v) for v in value.values())[:60],
)
def test_resume_is_bit_identical(tmp_path: Path, world_size: int, changes: dict[str, Any]) -> None:
    config = tiny_config(**{"optim": ADAMW, "checkpoint__every_steps": 3, "schedule": COSINE} | changes)
    whole = finished(tmp_path / "whole", config, world_size)
    passes = 2 if "max_per_device_batch_size" in changes else 1
    killed(tmp_path / "cut", config, world_size, 7 * passes)
    resumed = finished(tmp_path / "cut", config, world_size)
    assert "resume     step_00000006: epoch 0, step 6" in resumed.log()
    assert_same_ending(resumed, whole)


@pytest.mark.parametrize("name", ["lamb", "lion"])
def test_resume_is_bit_identical_with_timms_optimizers(tmp_path: Path, name: str) -> None:
    pytest.importorskip("timm")
    optim = {"name": name, "lr": 0.001, "weight_decay": 0.1}
    config = tiny_config(optim=optim, checkpoint__every_steps=3, model={"name": "tests.dist.toys:Mortal"})
    whole = finished(tmp_path / "whole", config, 2)
    killed(tmp_path / "cut", config, 2, 7)
    assert_same_ending(finished(tmp_path / "cut", config, 2), whole)


@pytest.mark.parametrize("world_size", [1, 2])
def test_samples_go_on_where_they_stopped(tmp_path: Path, world_size: int) -> None:
    # 20 images, batch 2: ten steps in each of three epochs. Killed in steps 16 and 23, with checkpoints at 14 and 21.
    changes: dict[str, Any] = {"data__residency": "stream", "data__num_workers": 0, "seed": 7, "max_epochs": 3}
    changes |= {"global_batch_size": 2, "checkpoint__every_steps": 7, "checkpoint__every_epochs": None}
    config = tiny_config(**changes, model={"name": "tests.dist.toys:Mortal"}, eval__every_epochs=None)
    size = {"TRAIN_SIZE": "20"}
    batches = []
    for epoch in range(3):
        order = splitmix.permutation(20, 7, epoch)
        batches += [order[start : start + 2] for start in range(0, 20, 2)]

    def reads_of(label: str, steps: int) -> list[list[int]]:
        return ids_read(tmp_path / label, world_size, [2] * steps)

    whole = finished(tmp_path / "whole", config, world_size, size | {"READS": str(tmp_path / "whole-reads")})
    assert reads_of("whole-reads", 30) == batches
    killed(tmp_path / "cut", config, world_size, 15, size | {"READS": str(tmp_path / "first")})
    assert reads_of("first", 16) == batches[:16]
    killed(tmp_path / "cut", config, world_size, 8, size | {"READS": str(tmp_path / "second")})
    assert reads_of("second", 9) == batches[14:23]  # and nothing of what was skipped
    resumed = finished(tmp_path / "cut", config, world_size, size | {"READS": str(tmp_path / "third")})
    assert reads_of("third", 9) == batches[21:]
    assert_same_ending(resumed, whole)


@pytest.mark.parametrize(("before", "after", "shards"), [(1, 2, 2), (2, 1, 2), (4, 2, 4), (4, 3, 0)])
def test_resume_on_another_number_of_processes(tmp_path: Path, before: int, after: int, shards: int) -> None:
    """With virtual shards to the bit; three processes in float64, within what DDP's sums allow."""
    changes: dict[str, Any] = {
        "data__residency": "stream",
        "data__num_workers": 0,
        "global_batch_size": 4,
        "max_epochs": 1,
        "virtual_shards": shards,
        "dtype": "float32" if shards else "float64",
        "model": {"name": "tests.dist.toys:Mortal"},
    }
    within, passes = (0.0, shards // before) if shards else (1e-12, 1)
    config = tiny_config(**changes, log__every_steps=2)
    size = {"TRAIN_SIZE": "32"}
    order = splitmix.permutation(32, 0, 0)
    batches = [order[start : start + 4] for start in range(0, 32, 4)]
    whole = finished(tmp_path / "whole", config, before, size)
    stopped = run(
        tmp_path / "cut", config, before, size | {"STOP_AT": str(2 * passes), "READS": str(tmp_path / "first")}
    )
    assert [outcome and (outcome.status, outcome.step) for outcome in stopped.outcomes] == [("stopped", 3)] * before
    assert ids_read(tmp_path / "first", before, [4] * 3) == batches[:3]
    resumed = finished(tmp_path / "cut", config, after, size | {"READS": str(tmp_path / "second")})
    assert ids_read(tmp_path / "second", after, [4] * 5) == batches[3:]
    assert resumed.outcome().step == 8
    for name, tensor in whole.export().items():
        torch.testing.assert_close(resumed.export()[name], tensor, rtol=0, atol=within)
    # Also the means that the stop cut in two: steps 3 and 4 were done by different numbers of processes.
    for (step, ours), (other_step, theirs) in zip(
        resumed.metric("train/loss"), whole.metric("train/loss"), strict=True
    ):
        assert step == other_step
        assert ours == pytest.approx(theirs, rel=0, abs=within)


def test_statistics_are_averaged_for_another_number_of_processes(tmp_path: Path) -> None:
    config = tiny_config(model={"name": "tests.dist.toys:WithBatchNorm"}, max_epochs=1)
    trained = finished(tmp_path / "run", config, 2)
    means = [own["buffer/features.1.running_mean"] for own in trained.checkpoint().ranks]
    assert not torch.equal(means[0], means[1])
    torch.testing.assert_close(trained.export()["features.1.running_mean"], (means[0] + means[1]) / 2)
    longer = tiny_config(model={"name": "tests.dist.toys:WithBatchNorm"}, max_epochs=2)
    stopped = run(tmp_path / "run", longer, 3, {"STOP_AT": "0"})
    assert stopped.outcome().step == 9
    counts = [int(own["buffer/features.1.num_batches_tracked"]) for own in stopped.checkpoint().ranks]
    assert counts == [9, 9, 9]


def test_what_a_resume_elsewhere_changes_is_said_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = "goes on elsewhere (world_size 2 -> 1): the same samples, not the same bits"
    dropout, norm = (
        tiny_config(model={"name": f"tests.dist.toys:{name}"}, max_epochs=1)
        for name in ("WithDropout", "WithBatchNorm")
    )
    for name, config, said in (
        ("dropout", dropout, "  other random numbers from here on in net.3"),
        ("norm", norm, "  the mean of what 2 ranks had gathered in features.1"),
    ):
        run(tmp_path / name, config, 2, {"STOP_AT": "3"})
        stopped = run(tmp_path / name, config, 1, {"STOP_AT": "0"})
        assert f"{head}\n{said}\n" in stopped.log()
        assert stopped.log().count("\n  ") == 1
        same = finished(tmp_path / name, config, 1)
        assert "goes on elsewhere" not in same.log()
    run(tmp_path / "torch", dropout, 1, {"STOP_AT": "3"})
    monkeypatch.setattr(facts, "versions", lambda: {"torch": "9.9"})
    now = finished(tmp_path / "torch", dropout, 1)
    assert f"goes on elsewhere (torch {torch.__version__} -> 9.9): " in now.log()
    assert "other random numbers from here on in net.3" in now.log()


def test_each_step_is_logged_once(tmp_path: Path) -> None:
    config = tiny_config(
        max_epochs=None, max_steps=12, checkpoint__every_steps=6, checkpoint__every_epochs=None,
        model={"name": "tests.dist.toys:Mortal"},
    )  # fmt: skip
    first = killed(tmp_path / "run", config, 1, 10)
    assert first.metric("train/loss")[-1][0] == 10
    # Event files are read in the order of their names, which hold the second of their start.
    started = int(time.time())
    wait_for(lambda: int(time.time()) > started, "the next second")
    resumed = finished(tmp_path / "run", config)
    steps = list(range(1, 13))
    assert [step for step, _ in resumed.events("train/loss")] == steps
    assert [step for step, _ in resumed.metric("train/loss")] == steps
    assert [value for _, value in resumed.events("train/loss")] == pytest.approx(
        [value for _, value in resumed.metric("train/loss")]
    )
    assert [step for step, _ in resumed.events("eval/top1")] == [8, 12]


def folder_content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"drop_last": True, "global_batch_size": 8},
            r"drop_last, and with it the steps of an epoch, changed: False -> True",
        ),
        ({"model__args": {"hidden": [8]}}, r"layers.0.weight: [16, 64] in the checkpoint, [8, 64] in the model"),
        ({"model": {"name": "tests.dist.toys:Mortal"}}, r"layers.1.bias: the model has no such tensor"),
        ({"data__name": "tests.dist.toys:renamed_classes"}, r"the class list changed"),
        ({"global_batch_size": 4}, r"global_batch_size, and with it the steps of an epoch, changed: 8 -> 4"),
        ({"dtype": "float64"}, r"dtype changed: float32 -> float64"),
        ({"optim": {"name": "adamw"}}, r"the optimizer changed: sgd -> adamw"),
    ],
)
def test_checkpoint_of_something_else_is_refused_and_left_alone(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    finished(tmp_path / "run", tiny_config(max_epochs=1))
    before = folder_content(tmp_path / "run" / "checkpoints")
    refused = run(tmp_path / "run", tiny_config(**changes))
    outcome = refused.outcome()
    assert refused.statuses == [2]
    assert (outcome.kind, outcome.exit_code) == ("checkpoint error", 2)
    assert told in (outcome.message or "")
    assert "run/checkpoints/step_00000008" in (outcome.message or "")
    assert folder_content(tmp_path / "run" / "checkpoints") == before


def test_refusal_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    finished(tmp_path / "run", tiny_config(max_epochs=1))
    refused = run(tmp_path / "run", tiny_config(model__args={"hidden": [8]}), 2)
    assert refused.statuses == [2, 2]
    assert [outcome and outcome.kind for outcome in refused.outcomes] == ["checkpoint error"] * 2


def test_damaged_newest_checkpoint_is_skipped_and_told(tmp_path: Path) -> None:
    config = tiny_config(checkpoint__every_steps=5)
    whole = finished(tmp_path / "run", config)
    assert whole.checkpoints()[-1] == "step_00000016"
    weights = tmp_path / "run" / "checkpoints" / "step_00000016" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    resumed = finished(tmp_path / "run", config)
    assert f"skipped {weights.parent}: model.safetensors has" in resumed.log()
    assert "resume     step_00000015" in resumed.log()
    assert resumed.outcome().step == 16
    assert resumed.checkpoint().name == "step_00000016"  # whole again


def test_only_damaged_checkpoints_are_told_and_kept(tmp_path: Path) -> None:
    config = tiny_config(max_epochs=1)
    finished(tmp_path / "run", config)
    (tmp_path / "run" / "checkpoints" / "step_00000008" / "manifest.json").unlink()
    refused = run(tmp_path / "run", config, 2)
    assert refused.statuses[0] == 2
    assert "no valid checkpoint is left" in (refused.outcome().message or "")
    assert refused.outcome(1).kind == "peer"
    assert refused.checkpoints() == ["best.json", "step_00000008"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_between_the_last_checkpoint_and_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    config = tiny_config(ema__half_life_samples=40.0)
    whole = finished(tmp_path / "whole", config, world_size)
    with monkeypatch.context() as patch:
        patch.setattr(summary, "result_of", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert run(tmp_path / "cut", config, world_size).statuses == [-signal.SIGKILL] * world_size
    resumed = finished(tmp_path / "cut", config, world_size)
    assert all(torch.equal(tensor, resumed.export()[name]) for name, tensor in whole.export().items())
    assert resumed.result()["metrics"] == whole.result()["metrics"]
    assert resumed.lines() == whole.lines()


def test_averages_start_from_the_weights_where_the_checkpoint_has_none(tmp_path: Path) -> None:
    finished(tmp_path / "run", tiny_config(max_epochs=1))
    weights = checkpoint.load(tmp_path / "run" / "checkpoints" / "step_00000008").shared["model"]
    longer = tiny_config(max_epochs=2, ema__half_life_samples=1e9, optim={"name": "sgd", "lr": 0.0})
    averages = finished(tmp_path / "run", longer).checkpoint().shared["ema"]
    for name, tensor in weights.items():
        torch.testing.assert_close(averages[name], tensor)


def test_weights_alone_are_taken_from_another_run(tmp_path: Path) -> None:
    source = finished(tmp_path / "source", tiny_config(max_epochs=1))
    frozen = {"optim": {"name": "sgd", "lr": 0.0}, "max_epochs": 1}
    for place in (tmp_path / "source", tmp_path / "source" / "model.safetensors"):
        taken = finished(tmp_path / f"taken-{place.name}", tiny_config(init_from=str(place), **frozen), 2)
        assert all(torch.equal(tensor, taken.export()[name]) for name, tensor in source.export().items())
        assert taken.outcome().step == 8


@pytest.mark.parametrize("fault", ["absent", "cut", "other"])
def test_weights_that_cannot_be_taken_are_told(tmp_path: Path, fault: str) -> None:
    finished(tmp_path / "source", tiny_config(max_epochs=1))
    file = tmp_path / "source" / "model.safetensors"
    changes: dict[str, Any] = {"init_from": str(file)}
    if fault == "absent":
        file.unlink()
    elif fault == "cut":
        file.write_bytes(file.read_bytes()[:100])
    else:
        changes["model__args"] = {"hidden": [8]}
    refused = run(tmp_path / "run", tiny_config(**changes))
    assert refused.statuses == [2]
    assert "source/model.safetensors" in (refused.outcome().message or "")
    shutil.rmtree(tmp_path / "source")


@pytest.mark.parametrize("optim", [{"name": "adamw", "lr": 0.01}, {"name": "sgd", "lr": 0.05, "momentum": 0.9}])
def test_resume_is_bit_identical_in_channels_last(tmp_path: Path, optim: dict[str, object]) -> None:
    changes = {"channels_last": True, "model": {"name": "tests.dist.toys:TwoConvolutions"}, "optim": optim}
    config = tiny_config(checkpoint__every_steps=3, **changes)
    whole = finished(tmp_path / "whole", config)
    killed = run(tmp_path / "cut", config, 1, {"DIE_AT": "7"})
    assert killed.statuses == [-signal.SIGKILL]
    resumed = finished(tmp_path / "cut", config)
    assert all(torch.equal(tensor, resumed.export()[name]) for name, tensor in whole.export().items())


def test_damaged_newer_checkpoints_do_not_push_out_good_ones(tmp_path: Path) -> None:
    mortal = tiny_config(
        checkpoint={"every_steps": 2, "every_epochs": None, "keep": 2},
        eval__every_epochs=None,
        model={"name": "tests.dist.toys:Mortal"},
    )
    run(tmp_path, mortal, 1, {"DIE_AT": "9"})
    folder = tmp_path / "checkpoints"
    for name in ("step_00000098", "step_00000099"):
        shutil.copytree(folder / "step_00000008", folder / name)
        (folder / name / "manifest.json").unlink()
    run(tmp_path, mortal, 1, {"DIE_AT": "3"})
    assert [path.name for path in checkpoint.step_folders(folder)] == ["step_00000008", "step_00000010"]
    assert all(checkpoint.fault_of(path) is None for path in checkpoint.step_folders(folder))
