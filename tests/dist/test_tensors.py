"""Networks whose tensors could not be saved, or would not stay the same on all ranks, end in one sentence."""

from pathlib import Path

import pytest

from tests.dist.harness import run, tiny_config

REFUSED = {
    "OneMemory": "head.weight and tail.weight are two parameters on one memory; use one Parameter for both",
    "Lazy": "head.weight, head.bias has no size before the first batch (a Lazy layer); give its sizes",
    "Complex": "waves is complex; keep real and imaginary part as real parameters",
    "Growing": "the forward pass makes or resizes seen; register parameters and buffers in __init__, with the size",
    "Later": "the forward pass makes or resizes centre; register parameters and buffers in __init__, with the size",
}


@pytest.mark.parametrize("shards", [0, 2])
@pytest.mark.parametrize("net", REFUSED)
def test_tensors_that_cannot_be_kept_are_refused(tmp_path: Path, net: str, shards: int) -> None:
    if net == "Growing" and shards:
        pytest.skip("refused within the first batch, with the other shards' tests")
    attempt = run(tmp_path, tiny_config(model={"name": f"tests.dist.odd_nets:{net}"}, virtual_shards=shards), 2)
    assert attempt.statuses == [2, 2]
    assert f"model.name: {REFUSED[net]}" in (attempt.outcome().message or "")


@pytest.mark.parametrize("shards", [0, 2])
def test_weights_that_a_rank_sets_by_what_it_sees_are_refused(tmp_path: Path, shards: int) -> None:
    config = tiny_config(model={"name": "tests.dist.odd_nets:ByFirstBatch"}, virtual_shards=shards)
    attempt = run(tmp_path / "two", config, 2)
    assert attempt.statuses == [2, 2]
    assert "model.name: after one batch scale is not the same on all ranks" in (attempt.outcome().message or "")
    assert run(tmp_path / "one", config, 1).statuses == [0]


@pytest.mark.parametrize("shards", [0, 2])
def test_one_sample_is_too_few_for_batchnorm_and_that_is_one_sentence(tmp_path: Path, shards: int) -> None:
    config = tiny_config(model={"name": "tests.dist.odd_nets:NormOfVectors"}, virtual_shards=shards)
    failed = run(tmp_path, config, 1, {"TRAIN_SIZE": "9"})
    assert failed.statuses == [2]
    assert "BatchNorm needs two samples: use drop_last=true" in (failed.outcome().message or "")
    assert "Traceback" not in failed.log()
