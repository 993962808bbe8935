"""Virtual shards: equal bits on 1, 2 and 4 processes, and after a resume from one number to another."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.contract import WorkerPlan
from configs.schema import RunConfig
from launch.verify.compare import CLOCKS
from tests import splitmix
from tests.dist import toys
from tests.dist.harness import Attempt, finished, in_ranks, run, tiny_config
from trainer import agreement, probe_shards, timing
from trainer.data.order import RankBatch
from trainer.faults import Pieces
from trainer.job import Job
from trainer.loop import train_step
from trainer.probe import build_alone
from trainer.runtime import RunContext

SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
CASES: dict[str, dict[str, Any]] = {
    "mlp": {},
    "batchnorm": {"model": {"name": "tests.dist.toys:WithBatchNorm"}, "ema__half_life_samples": 40.0},
    "dropout": {"model": {"name": "tests.dist.toys:WithDropout"}},
    "adamw, clipped": {"optim": {"name": "adamw", "lr": 0.01, "max_grad_norm": 0.5, "weight_decay": 0.1}},
    "muon": {"optim": {"name": "muon", "lr": 0.01, "momentum": 0.95, "weight_decay": 0.1}},
    "rmsprop": {
        "optim": {"name": "rmsprop", "lr": 0.001, "momentum": 0.9},
        "mixed_precision": "fp16",
        "ema__half_life_samples": 40.0,
    },
    "not fused": {"optim": SGD | {"fused": False}},
    "bf16": {"mixed_precision": "bf16", "model": {"name": "tests.dist.toys:WithBatchNorm"}},
    "fp16": {"mixed_precision": "fp16", "optim": SGD, "model": {"name": "tests.dist.toys:WithBatchNorm"}},
    "accumulation": {"max_per_device_batch_size": 2, "model": {"name": "tests.dist.toys:WithBatchNorm"}},
    "skip": {
        "nonfinite": "skip",
        "model": {"name": "tests.dist.toys:WithBatchNorm"},
        "faults": [{"kind": "nan", "step": 2}],
    },
    "channels last": {"channels_last": True, "model": {"name": "tests.dist.toys:TwoConvolutions"}},
    "odd parameters": {
        "optim": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
        "model": {"name": "tests.dist.odd_nets:OddParameters"},
    },
    "odd norms": {"model": {"name": "tests.dist.odd_nets:OddNorms"}, "ema__half_life_samples": 40.0},
    "odd buffers": {"model": {"name": "tests.dist.odd_nets:OddBuffers"}, "ema__half_life_samples": 40.0},
    "shared buffer": {"model": {"name": "tests.dist.odd_nets:SharedBuffer"}, "ema__half_life_samples": 40.0},
    "streamed": {"data__residency": "stream", "data__num_workers": 1, "data__augment": {"shift": 1, "cutout": 2}},
    "mixed": {
        "data__residency": "stream",
        "data__num_workers": 1,
        "data__augment": {"policy": "trivialaugment", "mixup": 0.2, "cutmix": 1.0},
        "loss": {"name": "bce", "class_weights": [1.0, 2.0, 1.0, 0.5]},
        "max_per_device_batch_size": 3,
    },
    "balanced": {"data__sampling": "balanced", "data__augment": {"shift": 1}, "log__sample_ids": True},
    "repeated": {
        "data__augment": {"repeats": 3, "shift": 1, "color_jitter": [0.4, 0.4, 0.4]},
        "data__residency": "stream",
        "data__num_workers": 1,
    },
    "copies mixed": {
        "data__augment": {"repeats": 2, "mixup": 0.4, "cutmix": 1.0, "erasing": 0.5, "erasing_mode": "noise"},
        "global_batch_size": 16,
        "max_epochs": 3,
    },
    "fp16, skipped": {
        "mixed_precision": "fp16",
        "optim": SGD,
        "max_epochs": 4,
        "model": {"name": "tests.dist.odd_nets:Overflowing"},
        "ema__half_life_samples": 40.0,
    },
    "rollback": {
        "nonfinite": "rollback",
        "checkpoint__every_steps": 1,
        "model": {"name": "tests.dist.odd_nets:OddBuffers"},
        "faults": [{"kind": "nan", "step": 2}],
    },
}
RAGGED = {"TRAIN_SIZE": "26"}
"""The last batch of an epoch has two samples: two of its four shards, and two of four ranks, have none."""


def config_of(case: str, **changes: Any) -> RunConfig:
    return tiny_config(**{"global_batch_size": 8, "virtual_shards": 4} | CASES[case] | changes)


def assert_same_tensors(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Byte for byte: -0 is not 0 here."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape), name
        one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, right[name]))
        assert torch.equal(one, other), name


def assert_same_bits(one: Attempt, other: Attempt) -> None:
    left, right = one.checkpoint(), other.checkpoint()
    assert left.name == right.name
    assert left.shared.keys() == right.shared.keys()
    for stem, tensors in left.shared.items():
        assert_same_tensors(tensors, right.shared[stem])
    for own in right.ranks[1:]:
        assert_same_tensors(own | {"window": right.ranks[0]["window"]}, right.ranks[0])
    assert_same_tensors(left.ranks[0], right.ranks[0])
    # Counters, the scale of fp16 and the last gradient norm among them.
    assert {key: left.state[key] for key in left.state.keys() - CLOCKS} == {
        key: right.state[key] for key in right.state.keys() - CLOCKS
    }
    assert one.lines() == other.lines()
    assert_same_tensors(one.export(), other.export())


@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_the_number_of_processes(tmp_path: Path, case: str) -> None:
    config = config_of(case)
    alone = finished(tmp_path / "1", config, 1, RAGGED)
    assert alone.checkpoint().state["train_state"]["step"] >= 6
    for world_size in (2, 4):
        assert_same_bits(alone, finished(tmp_path / str(world_size), config, world_size, RAGGED))


@pytest.mark.parametrize("case", CASES)
def test_eight_processes(tmp_path: Path, case: str) -> None:
    """The last batch has ten samples: at least three of the eight shards, and ranks, have none."""
    config = config_of(case, virtual_shards=8, global_batch_size=16)
    assert_same_bits(finished(tmp_path / "1", config, 1, RAGGED), finished(tmp_path / "8", config, 8, RAGGED))


def test_another_number_of_shards_is_another_run(tmp_path: Path) -> None:
    """So that equal bits are no accident of a network too small to tell."""
    two, four = (finished(tmp_path / str(n), config_of("batchnorm", virtual_shards=n)) for n in (2, 4))
    assert not all(torch.equal(tensor, four.weights()[name]) for name, tensor in two.weights().items())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_per_device_batch_size": 1},
        {"global_batch_size": 7, "drop_last": True},
        {"optim": {"name": "adamw", "lr": 0.01, "max_grad_norm": 0.05, "weight_decay": 0.1}},
        {"global_batch_size": 10, "data__augment": {"mixup": 0.3}, "optim": SGD},
    ],
    ids=["plain", "accumulation", "uneven", "clipped", "mixed in pairs"],
)
def test_weights_norms_and_losses_are_those_of_the_ordinary_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    """In float64, where only rounding is left to differ."""
    settings: dict[str, Any] = {"global_batch_size": 8, "dtype": "float64", "log__every_steps": 1} | changes
    plain = finished(tmp_path / "plain", tiny_config(**settings), 1, RAGGED)
    sharded = finished(tmp_path / "sharded", tiny_config(**settings, virtual_shards=4), 2, RAGGED)
    for name in ("train/loss", "optim/grad_norm", "eval/loss"):
        assert sharded.metric(name) == [(step, pytest.approx(value, rel=1e-12)) for step, value in plain.metric(name)]
    for name, tensor in plain.weights().items():
        torch.testing.assert_close(sharded.weights()[name], tensor, rtol=1e-12, atol=1e-14)


def test_spikes_are_judged_by_the_mean_loss_of_each_batch(tmp_path: Path) -> None:
    """Of ragged ones too, whose sum is smaller."""
    guarded: dict[str, Any] = {"dtype": "float64", "guard": {"spike_factor": 100.0, "spike_window_steps": 10}}
    plain = finished(tmp_path / "plain", tiny_config(global_batch_size=8, **guarded), 1, RAGGED)
    sharded = finished(tmp_path / "sharded", config_of("mlp", **guarded), 2, RAGGED)
    recent, expected = (run.checkpoint().state["train_state"]["recent_losses"] for run in (sharded, plain))
    assert len(recent) >= 8
    assert recent == pytest.approx(expected, rel=1e-12)


def test_running_statistics_take_in_the_shards_in_their_order(tmp_path: Path) -> None:
    """One step by hand: momentum 0.1, the unbiased variance of each shard of two samples in turn."""
    config = config_of("batchnorm", max_epochs=1, ema__half_life_samples=None)
    attempt = finished(tmp_path, config, 2, {"TRAIN_SIZE": "8"})
    torch.manual_seed(config.seed)
    model = toys.WithBatchNorm(4)
    images = toys.Images(8, 1).images[torch.tensor(splitmix.permutation(8, 0, 0))].float() / 255
    mean, var = torch.zeros(4), torch.ones(4)
    for shard in images.split(2):
        seen = model.features[0](shard).detach()
        mean = 0.9 * mean + 0.1 * seen.mean((0, 2, 3))
        var = 0.9 * var + 0.1 * seen.transpose(0, 1).flatten(1).var(1)
    own = attempt.checkpoint().ranks[0]
    torch.testing.assert_close(own["buffer/features.1.running_mean"], mean)
    torch.testing.assert_close(own["buffer/features.1.running_var"], var)
    assert int(own["buffer/features.1.num_batches_tracked"]) == 4


@pytest.mark.parametrize("case", ["batchnorm", "skip", "fp16, skipped", "rollback"])
def test_the_same_bits_where_outcomes_are_read_a_step_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """As on a GPU; and as where they are read at once."""
    changes: dict[str, Any] = {"log__every_steps": 3}
    at_once = finished(tmp_path / "at-once", config_of(case, **changes), 2, RAGGED)
    monkeypatch.setattr(agreement, "DEFERRED", ["cuda", "cpu"])
    for world_size in (1, 4):
        assert_same_bits(at_once, finished(tmp_path / str(world_size), config_of(case, **changes), world_size, RAGGED))


def test_what_is_compared_is_there(tmp_path: Path) -> None:
    attempt = finished(tmp_path, config_of("fp16, skipped", log__every_steps=1), 2, RAGGED)
    saved = attempt.checkpoint()
    assert saved.shared.keys() == {"model", "optimizer", "ema"}
    assert saved.shared["optimizer"].keys() == {"head.weight/momentum_buffer", "head.bias/momentum_buffer"}
    assert (saved.state["train_state"]["skipped"], saved.state["scaler"]["scale"]) == (6, 65536 / 2**6)
    metrics = set().union(*attempt.lines())
    assert {"train/loss", "optim/grad_norm", "optim/lr", "eval/loss", "eval/ema_top1", "fp16/scale"} <= metrics


def test_uneven_shards_in_uneven_micro_batches(tmp_path: Path) -> None:
    """Shards of 3, 4, 3, 4 and then of 2, 3, 2, 3 samples, two at a time."""
    config = config_of("dropout", global_batch_size=14, max_per_device_batch_size=2)
    alone, together = (finished(tmp_path / str(ranks), config, ranks, {"TRAIN_SIZE": "24"}) for ranks in (1, 4))
    assert_same_bits(alone, together)


@pytest.mark.parametrize(("shards", "ranks"), [(1, 1), (16, 2)])
def test_one_shard_and_as_many_as_samples(tmp_path: Path, shards: int, ranks: int) -> None:
    model = {"name": "tests.dist.odd_nets:Transformer"}
    config = config_of("mlp", model=model, virtual_shards=shards, global_batch_size=16)
    assert_same_bits(finished(tmp_path / "1", config, 1, RAGGED), finished(tmp_path / "n", config, ranks, RAGGED))


def test_each_shard_draws_its_own_numbers_on_any_rank(tmp_path: Path) -> None:
    model = {"name": "tests.dist.toys:NotesDraws"}
    config = config_of("accumulation", model=model, global_batch_size=16, max_epochs=1)
    drawn = {}
    for ranks in (1, 2, 4):
        draws = tmp_path / f"draws-{ranks}"
        finished(tmp_path / str(ranks), config, ranks, {"DRAWS": str(draws)})
        lines = [Path(f"{draws}.{rank}").read_text().split() for rank in range(ranks)]
        each = 8 // ranks  # micro-batches that a rank makes of each of the four batches
        drawn[ranks] = [own[batch * each :][:each] for batch in range(4) for own in lines]
        drawn[ranks] = [number for part in drawn[ranks] for number in part]
    assert len(set(drawn[1])) == 4 * 8
    assert drawn[2] == drawn[1]
    assert drawn[4] == drawn[1]


def test_a_checkpoint_evaluates_to_the_same_bits(tmp_path: Path) -> None:
    config = config_of("batchnorm")
    trained = finished(tmp_path, config, 2, RAGGED).result()["metrics"]
    for ranks in (1, 2, 4):
        attempt = finished(tmp_path, config, ranks, RAGGED, mode="eval", checkpoint="last")
        answer = json.loads((attempt.attempt.path / "eval.json").read_text(encoding="utf-8"))
        assert answer["metrics"] == {name: value for name, value in trained.items() if name.startswith("eval/")}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_kernels_do_not_depend_on_the_sizes_that_a_rank_sees(tmp_path: Path) -> None:
    """Rank 0 of two sees shards of four only, rank 1 of five; alone it sees both."""
    config = config_of("dropout", virtual_shards=2, global_batch_size=9, compile=True, max_epochs=1)
    environment = {"TRAIN_SIZE": "18", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    alone, together = (finished(tmp_path / str(ranks), config, ranks, environment) for ranks in (1, 2))
    assert_same_bits(alone, together)


@pytest.mark.parametrize(
    ("net", "said"),
    [
        ("Unsynchronised", "virtual_shards: norm is a SyncBatchNorm, which mixes the ranks' shards; use a BatchNorm"),
        ("WithoutMomentum", "virtual_shards: BatchNorm with momentum=None is not supported; give norm a momentum"),
        ("ByHand", "virtual_shards: the statistics of norm move without a call of the layer (F.batch_norm on them?)"),
        ("Growing", "virtual_shards: the forward pass resizes seen; give the buffer the size that it keeps"),
        ("Writes", "virtual_shards: put_ (layer put) has no deterministic kernel on cpu, and equal bits need one; use"),
    ],
)
def test_what_cannot_be_equal_is_refused(tmp_path: Path, net: str, said: str) -> None:
    attempt = run(tmp_path, config_of("mlp", model={"name": f"tests.dist.odd_nets:{net}"}), 2)
    assert attempt.statuses == [2, 2]
    assert said in (attempt.outcome().message or "")


def test_buffers_that_change_are_named_once(tmp_path: Path) -> None:
    log = finished(tmp_path, config_of("odd buffers"), 2, RAGGED).log()
    names = "counted, replaced, centre, body.parametrizations.weight.0._u and 1 more"
    assert log.count(f"changes, {names}: after each batch they are what the last shard leaves\n") == 1
    assert log.count("changes, outside: not saved, so each rank has its own, and the bits may depend on them\n") == 1


def test_frozen_and_repeated_norms(tmp_path: Path) -> None:
    """One step by hand: two shards, a norm that is called twice in each counts by its second call."""
    model = {"name": "tests.dist.odd_nets:OddNorms"}
    config = config_of("mlp", model=model, virtual_shards=2, max_epochs=1)
    own = finished(tmp_path, config, 2, {"TRAIN_SIZE": "8"}).checkpoint().ranks[0]
    assert own["buffer/frozen.running_mean"].tolist() == [pytest.approx(0.3)]
    assert int(own["buffer/frozen.num_batches_tracked"]) == 0
    assert int(own["buffer/one.num_batches_tracked"]) == 4
    assert int(own["buffer/three.num_batches_tracked"]) == 2
    # Of what it gave itself: mean 0.
    assert bool((own["buffer/one.running_mean"].abs() < 1e-6).all())


def test_a_probe_measures_what_the_mode_costs(tmp_path: Path) -> None:
    """On the network and the share of one of two ranks"""
    plan = WorkerPlan("train", config_of("batchnorm"), "torchrun", "cpu", 2, 2, 1)

    def measure(_: RunContext) -> tuple[dict[str, float], list[tuple[str, int, int]]]:
        taken: list[tuple[str, int, int]] = []

        def note(job: Job, batch: RankBatch, pieces: Pieces) -> None:
            kind = "plain" if job.shards is None else "shards"
            taken.append((kind, len(pieces), sum(len(images) for images, _ in pieces)))
            train_step(job, batch, pieces)

        timing.train_step = note
        with build_alone(plan) as job:
            return probe_shards.measure_shards(job, plan), taken

    ((found, taken),) = in_ranks(tmp_path, 1, measure)
    assert found.keys() == {"shards_ms", "accumulated_ms", "plain_ms"}
    assert min(found.values()) > 0
    assert set(taken) == {("plain", 2, 4), ("plain", 1, 4), ("shards", 2, 4)}
    assert taken[0::3] == taken[:1] * (len(taken) // 3)  # they take turns


def test_a_rollback_and_a_rank_without_samples_with_loader_workers(tmp_path: Path) -> None:
    """The workers after a rollback need a folder of their own; a rank that no batch has a sample for reads nothing."""
    streamed = {"data__residency": "stream", "data__num_workers": 1}
    for ranks in (1, 2):
        finished(tmp_path / f"back-{ranks}", config_of("rollback", **streamed), ranks, RAGGED)
    few = config_of("mlp", global_batch_size=4, virtual_shards=4, max_epochs=3, **streamed)
    one = finished(tmp_path / "few-1", few, 1, {"TRAIN_SIZE": "2"})
    assert_same_bits(one, finished(tmp_path / "few-4", few, 4, {"TRAIN_SIZE": "2"}))
