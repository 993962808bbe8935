"""Runs that begin with weights of others: fetched once, the backbone frozen, resumed, on any number of ranks."""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.models as zoo
from torch import Tensor

from configs.errors import EnvironmentProblem
from configs.schema import RunConfig
from configs.sections import ModelConfig
from tests.dist.harness import exit_statuses, finished, fork, run, tiny_config
from tests.dist.test_downloads import Server, server  # noqa: F401
from tests.dist.toys import Images
from trainer.published import prepare_weights

NAME = "shufflenet_v2_x0_5"  # 0.35 million parameters but for its head, and BatchNorm throughout
WEIGHTS = zoo.ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1
COMPILE = torch.nn.Module.compile
HEAD = {"fc.weight", "fc.bias"}


def as_published(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """A file in `folder` with the hash in its name, as torchvision publishes them: of RGB and 1000 classes."""
    torch.manual_seed(7)
    model = zoo.shufflenet_v2_x0_5()
    model(torch.rand(4, 3, 32, 32))  # moves its running statistics
    torch.save(model.state_dict(), folder / "new")
    digest = hashlib.sha256((folder / "new").read_bytes()).hexdigest()
    return (folder / "new").rename(folder / f"shufflenet-{digest[:8]}.pth"), model.state_dict()


def for_grey(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"conv1.0.weight": state["conv1.0.weight"].sum(1, keepdim=True)}


class SixClasses(Images):
    classes = ("a", "b", "c", "d", "e", "f")  # type: ignore[assignment]


def six_classes(train: bool) -> SixClasses:
    return SixClasses(64 if train else 23, 1 + (not train))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "hub" / "checkpoints"


def publish(path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WEIGHTS.value, "url", f"{url}/{path.name}")


def config(weights: str = "default", model: dict[str, Any] | None = None, **more: Any) -> RunConfig:
    settings = {"name": NAME, "weights": weights, "freeze_except": ["fc"]} | (model or {})
    return tiny_config(model=settings, checkpoint__every_steps=3, ema__half_life_samples=40.0, **more)


def fetch(note: Path) -> int:
    """What a process does that fetches; an error that is told to the user goes to `note`."""
    os.environ["no_proxy"] = "*"
    try:
        prepare_weights(ModelConfig(name=NAME, weights="default"))
    except EnvironmentProblem as error:
        note.write_text(str(error), encoding="utf-8")
        return 3
    return 0


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if path.name != ".lockstep.lock")


def test_weights_are_fetched_once_by_processes_that_start_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: Server,  # noqa: F811
    cache: Path,
) -> None:
    path, _ = as_published(server.files)
    publish(path, server.url, monkeypatch)
    notes = [tmp_path / f"note{i}" for i in range(3)]
    assert exit_statuses([fork(lambda note=note: fetch(note)) for note in notes]) == [0, 0, 0]
    assert server.requests() == [path.name]
    assert visible(cache) == [path.name]
    assert (cache / path.name).read_bytes() == path.read_bytes()
    server.stop()
    assert exit_statuses([fork(lambda: fetch(notes[0]))]) == [0]


@pytest.mark.parametrize("fault", ["no server", "not found", "other content", "cut short"])
def test_what_cannot_be_fetched_is_told_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: Server,  # noqa: F811
    cache: Path,
    fault: str,
) -> None:
    path, _ = as_published(server.files)
    publish(path, server.url, monkeypatch)
    if fault == "no server":
        server.stop()
    elif fault == "not found":
        path.unlink()
    else:
        path.write_bytes(b"something else" if fault == "other content" else path.read_bytes()[:-20])
    assert exit_statuses([fork(lambda: fetch(tmp_path / "note"))]) == [3]
    told = (tmp_path / "note").read_text()
    start = f"model.weights: IMAGENET1K_V1 of torchvision for {NAME} could not be downloaded from {server.url}/"
    assert told.startswith(start)
    assert told.endswith("or give the path of a file in model.weights")
    assert "\n" not in told
    assert visible(cache) == []


def test_damaged_weights_in_the_cache_are_fetched_anew(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: Server,  # noqa: F811
    cache: Path,
) -> None:
    path, _ = as_published(server.files)
    publish(path, server.url, monkeypatch)
    cache.mkdir(parents=True)
    (cache / path.name).write_bytes(path.read_bytes()[:-1])
    assert exit_statuses([fork(lambda: fetch(tmp_path / "note"))]) == [0]
    assert (cache / path.name).read_bytes() == path.read_bytes()


def test_process_that_is_killed_while_it_fetches_leaves_what_the_next_clears(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: Server,  # noqa: F811
    cache: Path,
) -> None:
    path, _ = as_published(server.files)
    publish(path, server.url, monkeypatch)
    original = torch.hub.download_url_to_file

    def fetch_and_die(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(torch.hub, "download_url_to_file", fetch_and_die)
        assert exit_statuses([fork(lambda: fetch(tmp_path / "note"))]) == [-signal.SIGKILL]
    assert [name[:10] for name in visible(cache)] == [".lockstep-"]
    assert exit_statuses([fork(lambda: fetch(tmp_path / "note"))]) == [0]
    assert visible(cache) == [path.name]


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_the_head_of_a_frozen_network_trains_and_a_resume_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, world_size: int
) -> None:
    cache.mkdir(parents=True)
    path, published = as_published(cache)
    publish(path, "http://127.0.0.1:9", monkeypatch)  # the ranks ask nobody
    whole = finished(tmp_path / "whole", config(), world_size)
    log, state = whole.log(), whole.export()
    assert f"weights    IMAGENET1K_V1 of torchvision, {path}: " in log
    assert (
        "conv1.0.weight: 3 channels summed to 1; new, from seed 0: fc.weight, fc.bias (4 classes, it has 1,000)" in log
    )
    assert "normalise  mean 0.449, std 0.226: those of the weights" in log
    assert "BatchNorm layers in evaluation mode, statistics as they are" in log
    expected = for_grey(published)
    wrong = [name for name, tensor in state.items() if name not in HEAD and not torch.equal(tensor, expected[name])]
    assert wrong == []
    assert whole.metric("train/loss")[-1][1] < whole.metric("train/loss")[0][1]
    assert {name.rpartition("/")[0] for name in whole.checkpoint().shared["optimizer"]} == HEAD
    killed = run(tmp_path / "cut", config(faults=[{"kind": "sigkill", "rank": 0, "step": 7}]), world_size)
    assert killed.statuses[0] == -signal.SIGKILL
    path.unlink()  # all that is needed is in the checkpoint
    resumed = finished(tmp_path / "cut", config(), world_size)
    assert all(torch.equal(tensor, resumed.export()[name]) for name, tensor in state.items())
    assert resumed.lines() == whole.lines()


def test_virtual_shards_of_a_frozen_network_have_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    path, published = as_published(tmp_path)
    one, two = (
        finished(
            tmp_path / f"{world_size}",
            config(str(path), {"freeze": ["conv1", "stage2", "stage3"], "freeze_except": []}, virtual_shards=2),
            world_size,
        )
        for world_size in (1, 2)
    )
    assert all(torch.equal(tensor, two.export()[name]) for name, tensor in one.export().items())
    expected = for_grey(published)
    moved = {name for name, tensor in one.export().items() if not torch.equal(tensor, expected[name])}
    assert {name.partition(".")[0] for name in moved} == {"stage4", "conv5", "fc"}


@pytest.mark.parametrize("changes", [{}, {"virtual_shards": 2}])
def test_checkpointing_changes_no_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = {"name": "mobilenet_v3_small", "args": {"width_mult": 0.25}}  # BatchNorm and dropout
    runs = [
        finished(tmp_path / f"{on}", tiny_config(model=model | {"checkpointing": on}, max_epochs=1, **changes), 2)
        for on in (False, True)
    ]
    assert "13 blocks: activations are computed again" in runs[1].log()
    (plain, less), (first, second) = [attempt.checkpoint() for attempt in runs], [attempt.lines() for attempt in runs]
    for before, after in zip((plain.shared["model"], *plain.ranks), (less.shared["model"], *less.ranks), strict=True):
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert first == second


@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_training_freezes_and_checkpoints_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """Through the compiler's own recomputation, without its C++; a batch of another size at the end runs eagerly."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: COMPILE(self, backend="aot_eager"))
    model = {"name": "small_resnet", "args": {"depth": 1, "width": 8}, "freeze": ["stem"], "checkpointing": True}
    settings: dict[str, Any] = {"model": model, "global_batch_size": 12, "max_epochs": 1, "dtype": "float64"}
    eager = finished(tmp_path / "eager", tiny_config(**settings), world_size)
    compiled = finished(tmp_path / "compiled", tiny_config(compile=True, **settings), world_size)
    plain = finished(
        tmp_path / "plain", tiny_config(**settings | {"model": model | {"checkpointing": False}}), world_size
    )
    for name, tensor in plain.export().items():
        assert torch.equal(eager.export()[name], tensor), name
        torch.testing.assert_close(compiled.export()[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
    assert int(plain.export()["stem.1.num_batches_tracked"]) == 0
    assert int(plain.export()["blocks.0.first.1.num_batches_tracked"]) == 6


def test_what_was_frozen_trains_on_when_it_is_no_longer(tmp_path: Path) -> None:
    path, _ = as_published(tmp_path)
    first = finished(tmp_path / "run", config(str(path), max_epochs=1))
    before = first.export()
    more = finished(tmp_path / "run", config(str(path), {"freeze_except": []}, max_epochs=2), allow_changes=True)
    assert not torch.equal(more.export()["conv5.0.weight"], before["conv5.0.weight"])
    again = finished(tmp_path / "run", config(str(path), max_epochs=3), allow_changes=True)
    assert torch.equal(again.export()["conv5.0.weight"], more.export()["conv5.0.weight"])


def test_a_run_folder_gives_its_weights_to_another_number_of_classes(tmp_path: Path) -> None:
    source = finished(tmp_path / "source", tiny_config(max_epochs=1))
    model = {"name": "mlp", "args": {"hidden": [16]}, "weights": str(source.run_dir.path), "freeze": "layers.0"}
    other = tiny_config(max_epochs=1, model=model, data__name=f"{__name__}:six_classes", data__num_classes=6)
    taken = finished(tmp_path / "taken", other, 2)
    assert torch.equal(taken.export()["layers.0.weight"], source.export()["layers.0.weight"])
    assert "new, from seed 0: layers.1.weight, layers.1.bias (6 classes, it has 4)" in taken.log()


@pytest.mark.parametrize(
    ("model", "code", "told"),
    [
        ({"weights": "default"}, 3, "IMAGENET1K_V1 of torchvision for shufflenet_v2_x0_5 is not in the cache"),
        ({"weights": "none", "freeze_except": ["fcc"]}, 2, "'fcc' is no parameter or module of the network"),
    ],
)
def test_what_cannot_be_is_told_by_every_rank_before_the_first_step(
    tmp_path: Path, cache: Path, model: dict[str, Any], code: int, told: str
) -> None:
    attempt = run(tmp_path / "run", config(model=model), 2)
    assert attempt.statuses == [code, code]
    assert told in (attempt.outcome().message or "")
    assert not attempt.run_dir.checkpoints.exists()
