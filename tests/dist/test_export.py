"""model.safetensors in the hands of a program that knows nothing of Lockstep."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.dist import toys
from tests.dist.harness import finished, tiny_config


@pytest.mark.parametrize(("world_size", "half_life"), [(1, None), (2, None), (2, 40.0)])
@pytest.mark.parametrize("name", ["WithBatchNorm", "WithTiedWeights"])
def test_export_loads_strictly_into_the_bare_model_and_scores_what_was_logged(
    tmp_path: Path, world_size: int, half_life: float | None, name: str
) -> None:
    changes: dict[str, Any] = {"model": {"name": f"tests.dist.toys:{name}"}, "ema__half_life_samples": half_life}
    attempt = finished(tmp_path, tiny_config(**changes), world_size)
    model = getattr(toys, name)(4)
    weights = load_file(attempt.run_dir.weights)
    assert weights.keys() == model.state_dict().keys()
    assert all(weights[name].dtype == tensor.dtype for name, tensor in model.state_dict().items())
    model.load_state_dict(weights, strict=True)
    model.eval()
    data = toys.images(train=False)
    with torch.no_grad():
        answers = model(data.images.float() / 255).argmax(1)
    right = int((answers == data.labels).sum()) / 23
    metrics = attempt.result()["metrics"]
    assert right == metrics["eval/top1" if half_life is None else "eval/ema_top1"]
    assert 0.3 < right <= 1.0


def test_result_says_what_ran(tmp_path: Path) -> None:
    result = finished(tmp_path, tiny_config(), 2).result()
    assert (result["world_size"], result["device"], result["precision"], result["threads_per_rank"]) == (
        2,
        "cpu",
        "no",
        1,
    )
    assert (result["step"], result["epoch"], result["samples_seen"], result["skipped"]) == (16, 2, 128, 0)
    assert result["versions"]["torch"] == torch.__version__
    in_detail = {"eval/balanced_accuracy", "eval/ece"}
    assert set(result["metrics"]) == {"eval/loss", "eval/top1", "train/loss"} | in_detail
