"""Updates against hand-made ones: windows of micro-batches, the learning rate, what is logged of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from configs.schema import RunConfig
from tests import splitmix
from tests.dist import toys
from tests.dist.harness import Attempt, finished, run, tiny_config
from trainer.runtime import RunContext


def by_hand(config: RunConfig, size: int, batch: int) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """One epoch of plain SGD on whole batches. Returns weights, losses before each update, and gradient norms."""
    torch.manual_seed(config.seed)
    model = toys.Mortal(4)
    data = toys.Images(size, 1)
    order = splitmix.permutation(size, config.seed, 0)
    losses, norms = [], []
    for start in range(0, size, batch):
        ids = order[start : start + batch]
        loss = F.cross_entropy(model(data.images[ids].float() / 255), data.labels[ids])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.item())
        norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= config.optim.lr * gradient
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses, norms


def count_reductions(path: Path) -> Any:
    """A stand-in for RunContext.prepare that notes each all-reduce of gradients in `path`."""
    original = RunContext.prepare

    def hook(rank: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if rank == 0:
            with open(path, "a", encoding="ascii") as file:
                file.write("x")
        buffer = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])

    def prepare(self: RunContext, model: nn.Module) -> nn.Module:
        prepared = original(self, model)
        prepared.register_comm_hook(self.rank, hook)  # type: ignore[operator]
        return prepared

    return prepare


@pytest.mark.parametrize(("world_size", "cap"), [(1, None), (1, 2), (1, 3), (2, None), (2, 1), (2, 3), (3, 1)], ids=str)
def test_last_incomplete_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, cap: int | None
) -> None:
    # Ten samples, windows of eight and of two.
    changes: dict[str, Any] = {"max_epochs": 1, "max_per_device_batch_size": cap, "optim": {"name": "sgd", "lr": 0.1}}
    config = tiny_config(**changes, model={"name": "tests.dist.toys:Mortal"})
    reductions = tmp_path / "reductions"
    if world_size > 1:
        monkeypatch.setattr(RunContext, "prepare", count_reductions(reductions))
    attempt = finished(tmp_path / "run", config, world_size, {"TRAIN_SIZE": "10"})
    weights, losses, norms = by_hand(config, 10, 8)
    for name, tensor in weights.items():
        torch.testing.assert_close(attempt.weights()[name], tensor, rtol=0, atol=1e-6)
    assert [step for step, _ in attempt.metric("train/loss")] == [1, 2]
    assert [value for _, value in attempt.metric("train/loss")] == pytest.approx(losses, abs=1e-6)
    assert [value for _, value in attempt.metric("optim/grad_norm")] == pytest.approx(norms, abs=1e-6)
    if world_size > 1:
        # One of weight zero before the first step, then one a step, however many micro-batches there are.
        assert reductions.read_text() == "xxx"


@pytest.mark.parametrize("world_size", [1, 2])
def test_learning_rate_goes_by_steps_whatever_the_world_size(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(
        max_epochs=None, max_steps=10, schedule={"name": "cosine"}, optim={"name": "sgd", "lr": 1.0},
        max_per_device_batch_size=2,
    )  # fmt: skip
    attempt = finished(tmp_path, config, world_size)
    expected = [0.976, 0.905, 0.794, 0.655, 0.500, 0.345, 0.206, 0.095, 0.024, 0.000]
    for found in (attempt.metric("optim/lr"), attempt.events("optim/lr")):
        assert [step for step, _ in found] == list(range(1, 11))
        assert [value for _, value in found] == pytest.approx(expected, abs=5e-4)


def event_files(attempt: Attempt) -> list[Path]:
    return list(attempt.run_dir.path.rglob("events*"))


@pytest.mark.parametrize(
    ("world_size", "batch", "loss"), [(1, 8, 1.0), (2, 8, 2.0), (2, 3, (1 + 2 * 3) / 3), (3, 4, (1 + 3 + 2 * 5) / 4)]
)
def test_logged_loss_is_the_mean_over_the_global_batch(
    tmp_path: Path, world_size: int, batch: int, loss: float
) -> None:
    config = tiny_config(
        model={"name": "tests.dist.toys:LossOfRank"}, loss={"name": "nll"}, global_batch_size=batch, max_epochs=1,
    )  # fmt: skip
    attempt = finished(tmp_path, config, world_size, {"TRAIN_SIZE": str(2 * batch)})
    assert attempt.metric("train/loss") == [(1, pytest.approx(loss, abs=1e-12)), (2, pytest.approx(loss, abs=1e-12))]
    assert attempt.events("train/loss") == [(1, pytest.approx(loss)), (2, pytest.approx(loss))]
    assert len(event_files(attempt)) == 1
    assert event_files(attempt)[0].parent == attempt.run_dir.path


def test_logged_loss_is_the_mean_since_the_last_point(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_epochs": 1, "optim": {"name": "sgd", "lr": 0.1}, "log__every_steps": 3}
    config = tiny_config(**changes, global_batch_size=6, model={"name": "tests.dist.toys:Mortal"})
    attempt = finished(tmp_path, config, 2, {"TRAIN_SIZE": "28"})
    _, losses, norms = by_hand(config, 28, 6)  # batches of 6, 6, 6, 6 and 4
    assert attempt.metric("train/loss") == [
        (3, pytest.approx(sum(losses[:3]) / 3, abs=1e-6)),
        (5, pytest.approx((6 * losses[3] + 4 * losses[4]) / 10, abs=1e-6)),
    ]
    mean = (6 * sum(losses[:4]) + 4 * losses[4]) / 28
    assert f"epoch 1  step 5/5  mean training loss {mean:.4f}" in attempt.log()
    assert attempt.metric("optim/grad_norm")[0] == (3, pytest.approx(norms[2], abs=1e-6))


def test_label_smoothing_is_for_training_only(tmp_path: Path) -> None:
    config = tiny_config(
        model={"name": "tests.dist.toys:AlwaysZero"}, loss={"label_smoothing": 0.5}, max_epochs=1, optim={"lr": 0.0}
    )
    attempt = finished(tmp_path, config)
    # Logits (1, 0, 0, 0): with smoothing the target is 1/2 + 1/8 on the label and 1/8 on each other class.
    log_sum = torch.tensor([1.0, 0, 0, 0]).logsumexp(0).item()
    share = {"train": toys.Images(64, 1).labels.eq(0).double().mean().item()}
    share["eval"] = toys.Images(23, 2).labels.eq(0).double().mean().item()
    smoothed = [value for _, value in attempt.metric("train/loss")]
    assert sum(smoothed) / 8 == pytest.approx(
        log_sum - (0.625 * share["train"] + 0.125 * (1 - share["train"])), abs=1e-6
    )
    assert attempt.metric("eval/loss") == [(8, pytest.approx(log_sum - share["eval"], abs=1e-6))]


def test_what_a_model_draws_differs_by_step_micro_batch_and_rank_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_per_device_batch_size": 2, "checkpoint__every_steps": 3, "max_epochs": 2}
    config = tiny_config(**changes, model={"name": "tests.dist.toys:NotesDraws"})

    def drawn(label: str) -> list[list[float]]:
        return [[float(line) for line in Path(f"{tmp_path / label}.{rank}").read_text().split()] for rank in range(2)]

    finished(tmp_path / "run", config, 2, {"DRAWS": str(tmp_path / "whole")})
    whole = drawn("whole")
    assert [len(draws) for draws in whole] == [2 * 16, 2 * 16]
    assert len({value for draws in whole for value in draws}) == 64
    cut = run(tmp_path / "cut", config, 2, {"DRAWS": str(tmp_path / "cut-draws"), "DIE_AT": "10", "DIE_RANK": "1"})
    assert cut.checkpoint().name == "step_00000003"
    finished(tmp_path / "cut", config, 2, {"DRAWS": str(tmp_path / "rest")})
    assert drawn("rest") == [draws[2 * 3 :] for draws in whole]
