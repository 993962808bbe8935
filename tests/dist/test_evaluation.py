"""Every sample counted once, the same number to the last digit on any number of processes."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.augment_section import AugmentConfig
from configs.errors import ConfigError
from configs.loss_section import LossConfig
from configs.sections import EvalConfig
from tests.dist import toys
from tests.dist.harness import finished, in_ranks, run, tiny_config
from tests.dist.toys import images
from trainer.data.augment import Preprocess
from trainer.data.datasets import TensorSplit
from trainer.data.resident import ResidentSource
from trainer.evaluate import EvalResult, Evaluator, load_averaged
from trainer.losses import cross_entropy_sum, nll_sum
from trainer.optim import averaged_tensors
from trainer.runtime import RunContext

CPU = torch.device("cpu")
LABELS = [0, 0, 0, 1, 1, 2, 3]
Results = dict[tuple[int, int, str], EvalResult]


def evaluator(
    model: nn.Module, images: Tensor, labels: list[int], batch: int, mode: str, classes: int = 2
) -> Evaluator:
    source = ResidentSource(TensorSplit(images, torch.tensor(labels)), CPU)
    preprocess = Preprocess(AugmentConfig(), 0, None, None, torch.float32, CPU)
    config = EvalConfig(batch_size=batch, mode=mode)  # type: ignore[arg-type]
    return Evaluator(
        model, model, source, preprocess, partial(cross_entropy_sum, LossConfig(), None), config, classes, False
    )


def images_of(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


class LogProbabilities(nn.Module):
    """(1/4, 3/4) for an image whose right half is the brighter one, else (3/4, 1/4)."""

    def forward(self, images: Tensor) -> Tensor:
        is_right = images[..., 4:].mean((1, 2, 3)) > images[..., :4].mean((1, 2, 3))
        first = torch.where(is_right, 0.25, 0.75)
        return torch.stack([first, 1 - first], 1).log()


def score_always_zero(context: RunContext) -> Results:
    model = toys.AlwaysZero(2).eval()
    return {
        (5, batch, mode): evaluator(model, images_of(5), LABELS[:5], batch, mode).evaluate(
            context, averaged_tensors(model)
        )
        for batch in (1, 2, 4, 100)
        for mode in ("sharded", "rank0")
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_three_of_five_are_right(tmp_path: Path, world_size: int) -> None:
    # Logits (1, 0): the loss is log(1 + 1/e) for class 0 and 1 more for class 1.
    loss = (3 * 0.31326168751822286 + 2 * 1.3132616875182228) / 5
    for results in in_ranks(tmp_path, world_size, score_always_zero):
        for result in results.values():
            assert (result.top1, result.count, result.top5) == (0.6, 5, None)
            assert result.loss == pytest.approx(loss, abs=1e-6)


def score_linear(context: RunContext) -> Results:
    torch.manual_seed(0)
    model = toys.Mortal(7).eval()
    return {
        (size, batch, mode): evaluator(model, images_of(size), LABELS[:size], batch, mode, classes=7).evaluate(
            context, averaged_tensors(model)
        )
        for size in (1, 4, 5, 6, 7)
        for batch in (1, 2, 3)
        for mode in ("sharded", "rank0")
    }


def test_result_is_bit_equal_on_any_number_of_processes_and_in_both_modes(tmp_path: Path) -> None:
    (alone,) = in_ranks(tmp_path, 1, score_linear)
    torch.manual_seed(0)
    model = toys.Mortal(7).double().requires_grad_(False)
    for (size, batch, mode), result in alone.items():
        assert result == alone[size, batch, "sharded"], mode
        labels = torch.tensor(LABELS[:size])
        logits = model(images_of(size).double() / 255)
        assert result.loss == pytest.approx(float(F.cross_entropy(logits, labels)), abs=1e-6)
        ranks_of_truth = [
            sorted(row, reverse=True).index(row[int(label)]) for row, label in zip(logits.tolist(), labels, strict=True)
        ]
        assert result.top1 == sum(place < 1 for place in ranks_of_truth) / size
        assert result.top5 == sum(place < 5 for place in ranks_of_truth) / size
    for world_size in (2, 3):
        assert in_ranks(tmp_path, world_size, score_linear) == [alone] * world_size


def average_of_ranks(context: RunContext) -> tuple[Any, Any]:
    mine, copy = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    mine.running_mean.fill_(float(context.rank))  # type: ignore[union-attr,operator]
    load_averaged(copy, averaged_tensors(mine), context)
    return copy.running_mean.tolist(), mine.running_mean.tolist()  # type: ignore[union-attr,operator]


def test_statistics_are_averaged_on_a_copy(tmp_path: Path) -> None:
    assert in_ranks(tmp_path, 3, average_of_ranks) == [([1.0, 1.0], [float(rank)] * 2) for rank in range(3)]


@pytest.mark.parametrize(("world_size", "mode"), [(1, "sharded"), (2, "sharded"), (3, "rank0")])
def test_whole_run_logs_the_exact_fraction(tmp_path: Path, world_size: int, mode: str) -> None:
    config = tiny_config(
        model={"name": "tests.dist.toys:AlwaysZero"}, eval={"batch_size": 2, "mode": mode}, max_epochs=1
    )
    attempt = finished(tmp_path, config, world_size, {"EVAL_SIZE": "13"})
    right = toys.Images(13, 2).labels.eq(0).sum().item() / 13
    assert attempt.metric("eval/top1") == [(8, right)]
    assert attempt.result()["metrics"]["eval/top1"] == right
    assert f"evaluated 13/13: top-1 {100 * right:.2f} %" in attempt.log()


def test_checkpoint_evaluates_the_same_on_any_number_of_processes(tmp_path: Path) -> None:
    config = tiny_config(model={"name": "tests.dist.toys:WithBatchNorm"}, ema__half_life_samples=40.0, max_epochs=1)
    trained = finished(tmp_path, config, 2)
    logged = {name: value for name, value in trained.result()["metrics"].items() if name.startswith("eval/")}
    names = ("loss", "top1", "balanced_accuracy", "ece")
    assert set(logged) == {f"eval/{prefix}{name}" for prefix in ("", "ema_") for name in names}
    for world_size in (1, 2, 3):
        attempt = finished(tmp_path, config, world_size, mode="eval", checkpoint="last")
        answer = json.loads((attempt.attempt.path / "eval.json").read_text(encoding="utf-8"))
        assert answer["checkpoint"] == "step_00000008"
        assert answer["metrics"] == pytest.approx(logged, abs=1e-6)
        assert {name: v for name, v in answer["metrics"].items() if "top1" in name} == {
            name: v for name, v in logged.items() if "top1" in name
        }


@pytest.mark.parametrize(("which", "found"), [("best", None), ("last", "step_00000016"), ("8", "step_00000008")])
def test_checkpoint_to_evaluate_is_chosen(tmp_path: Path, which: str, found: str | None) -> None:
    config = tiny_config()
    trained = finished(tmp_path, config)
    best = f"step_{trained.result()['best']['step']:08d}"
    attempt = finished(tmp_path, config, mode="eval", checkpoint=which)
    assert json.loads((attempt.attempt.path / "eval.json").read_text())["checkpoint"] == (found or best)


def test_checkpoint_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    config = tiny_config(max_epochs=1)
    finished(tmp_path, config)
    refused = run(tmp_path, config, 2, mode="eval", checkpoint="5")
    assert refused.statuses == [2, 1]  # rank 0 knows; rank 1 knows that rank 0 failed
    assert "has no checkpoint '5'; it has step_00000008" in (refused.outcome().message or "")


@pytest.mark.parametrize("world_size", [1, 2])
def test_buffers_that_are_no_averages_are_those_of_the_trained_network(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(model={"name": "tests.dist.toys:SwitchedOn"}, max_epochs=1)
    trained = finished(tmp_path, config, world_size)
    ones = int((images(False).labels == 1).sum())
    assert trained.result()["metrics"]["eval/top1"] == ones / 23


def test_mirror_images_are_scored_too(tmp_path: Path) -> None:
    model = toys.AlwaysZero(2).eval()
    scorer = evaluator(model, images_of(5), LABELS[:5], 2, "sharded")
    sees_left = nn.Sequential(nn.Flatten(), nn.Linear(64, 2, bias=False)).double()
    with torch.no_grad():
        sees_left[1].weight.zero_()[0, ::8] = 1.0  # class 0: the sum of the left column

    def score(context: RunContext) -> list[list[float]]:
        flipping = Evaluator(
            **{**scorer.__dict__, "model": sees_left, "config": EvalConfig(flip=True), "preprocess": doubles}
        )
        return flipping._logits(context, image).tolist()

    doubles = Preprocess(AugmentConfig(), 0, None, None, torch.float64, CPU)
    image = images_of(1)
    ((row,),) = in_ranks(tmp_path, 1, score)
    pixels = image[0, 0].double() / 255
    assert row == pytest.approx([float(pixels[:, 0].sum() + pixels[:, 7].sum()) / 2, 0.0])


def test_shifted_views_count_half(tmp_path: Path) -> None:
    """By numpy: the corner pixel, of the image and of its reflected padding two pixels up left and down right."""

    def score(context: RunContext) -> list[list[float]]:
        scorer = evaluator(Corner(), image, [0], 5, "sharded")
        both = replace(scorer, preprocess=doubles, config=EvalConfig(shift=2))
        return both._logits(context, image).tolist()

    doubles = Preprocess(AugmentConfig(), 0, None, None, torch.float64, CPU)
    image = images_of(1)
    ((row,),) = in_ranks(tmp_path, 1, score)
    pixels = np.pad(image[0, 0].numpy(), 2, mode="reflect") / 255
    assert row == pytest.approx([pixels[2, 2] / 2 + pixels[0, 0] / 4 + pixels[4, 4] / 4, 0.0])


def test_a_shift_as_far_as_the_image_is_refused(tmp_path: Path) -> None:
    def score(context: RunContext) -> str:
        scorer = evaluator(Corner(), image, [0], 5, "sharded")
        with pytest.raises(ConfigError) as caught:
            replace(scorer, config=EvalConfig(shift=8)).evaluate(context, averaged_tensors(scorer.model))
        return str(caught.value)

    image = images_of(1)
    assert in_ranks(tmp_path, 1, score) == ["eval.shift is 8 and the images have 8 pixels; use less"]


class Corner(nn.Module):
    """Says what the first pixel is."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([images[:, 0, 0, 0], torch.zeros(len(images), dtype=images.dtype)], dim=1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_flips_are_told_and_give_log_probabilities_of_log_probabilities(tmp_path: Path, world_size: int) -> None:
    def score(context: RunContext) -> tuple[str, float]:
        model = LogProbabilities()
        scorer = evaluator(model, image, [0], 5, "sharded")
        loss = partial(nll_sum, LossConfig(name="nll"), None)
        flipping = replace(scorer, config=EvalConfig(flip=True), loss_sum=loss, loss_name="nll")
        result = flipping.evaluate(context, averaged_tensors(model))
        assert result is not None
        return result.describe(""), result.loss

    # Mean pixels 0 on the left and 1 on the right: p = (1/4, 3/4), mirrored (3/4, 1/4); their geometric mean is (a, a),
    # so each is 1/2 once it is normalised. Without that the loss would be -log(sqrt(3)/4) = 0.837.
    image = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    image[..., 4:] = 255
    for text, loss in in_ranks(tmp_path, world_size, score):
        assert text.startswith("evaluated 1/1 with flips: ")
        assert loss == pytest.approx(math.log(2), abs=1e-6)


def test_what_a_network_draws_in_evaluation_is_keyed_by_the_batch(tmp_path: Path) -> None:
    config = tiny_config(model={"name": "tests.dist.toys:DrawsInEvaluation"}, max_epochs=1, eval__batch_size=4)
    trained = finished(tmp_path / "run", config, 1).result()["metrics"]
    for world_size in (1, 2, 3):
        attempt = finished(tmp_path / "run", config, world_size, mode="eval", checkpoint="last")
        metrics = json.loads((attempt.attempt.path / "eval.json").read_text())["metrics"]
        assert metrics["eval/loss"] == trained["eval/loss"]
