"""What ranks do together, without a run around it."""

import os
import signal
from pathlib import Path

import pytest
import torch

from configs.contract import WorkerPlan
from configs.errors import ConfigError, EnvironmentProblem
from tests.dist.harness import exit_statuses, fork, in_ranks, tiny_config
from trainer.parent import die_with_parent
from trainer.peers import PeerError
from trainer.runtime import RunContext


def numbers(context: RunContext) -> tuple[int, int, int, bool, list[int], list[float], str]:
    tensor = torch.tensor([float(context.rank), 1.0])
    context.all_reduce_sum(tensor)
    ids = (context.rank, context.local_rank, context.world_size)
    return *ids, context.is_rank_zero, context.gather_objects(context.rank), tensor.tolist(), str(context.device)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_know_each_other(tmp_path: Path, world_size: int) -> None:
    everyone = list(range(world_size))
    found = in_ranks(tmp_path, world_size, numbers)
    for rank, (own, local, world, is_zero, gathered, total, device) in enumerate(found):
        assert (own, local, world, is_zero, gathered) == (rank, rank, world_size, rank == 0, everyone)
        assert total == [sum(everyone), world_size]
        assert device.startswith("cpu")


def of_rank_zero(context: RunContext) -> list[tuple[str, list[int], list[float]]]:
    value = context.rank + 1
    tensors = [torch.tensor(value % 2 == 1), torch.full((2, 1), value, dtype=torch.int64), torch.zeros(0)]
    tensors += [torch.full((3,), value / 4, dtype=torch.bfloat16), torch.tensor(float(value), dtype=torch.float64)]
    return [(str(t.dtype), list(t.shape), t.flatten().tolist()) for t in context.of_rank(0, tensors)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tensors_of_any_type_come_from_rank_zero(tmp_path: Path, world_size: int) -> None:
    found = in_ranks(tmp_path, world_size, of_rank_zero)
    bits = ("torch.bool", [], [True]), ("torch.int64", [2, 1], [1, 1]), ("torch.float32", [0], [])
    assert found == [[*bits, ("torch.bfloat16", [3], [0.25] * 3), ("torch.float64", [], [1.0])]] * world_size


def odd_values(context: RunContext) -> list[dict[str, object]]:
    """The ranks' texts differ in length."""
    return context.gather_objects({"é": "x" * context.rank, "n": None, "f": 0.1, "l": [context.rank] * context.rank})


def test_values_of_different_lengths_are_gathered(tmp_path: Path) -> None:
    expected = [{"é": "x" * rank, "n": None, "f": 0.1, "l": [rank] * rank} for rank in range(3)]
    assert in_ranks(tmp_path, 3, odd_values) == [expected] * 3


def fails_on_rank_1(context: RunContext) -> list[str]:
    def work() -> int:
        if context.rank == 1:
            raise ConfigError("boom-731")
        return 7

    told = []
    for function in (work, lambda: context.rank):
        try:
            told.append(str(context.together(function)))
        except (ConfigError, PeerError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_error_of_one_rank_is_raised_on_all_and_the_next_work_goes_on(tmp_path: Path) -> None:
    assert in_ranks(tmp_path, 3, fails_on_rank_1) == [
        ["PeerError: rank 1 failed: boom-731", "0"],
        ["ConfigError: boom-731", "1"],
        ["PeerError: rank 1 failed: boom-731", "2"],
    ]


def draws(context: RunContext) -> list[tuple[float, ...]]:
    """For (seed, batch, micro-batch), by rank."""
    found = []
    for seed, batch, micro_batch in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0)):
        context.seed_dropout(seed, batch, context.rank, micro_batch)
        found.append(tuple(torch.rand(3).tolist()))
    return found


def test_dropout_differs_by_rank_batch_and_micro_batch_and_is_the_same_again(tmp_path: Path) -> None:
    ranks = in_ranks(tmp_path, 2, draws)
    for found in ranks:
        assert found[4] == found[0]
        assert len(set(found)) == 4
    assert not set(ranks[0]) & set(ranks[1])
    assert in_ranks(tmp_path, 2, draws) == ranks


def test_world_size_that_is_not_the_plans_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    plan = WorkerPlan("train", tiny_config(), "torchrun", "cpu", 2, 2, 1)
    with pytest.raises(EnvironmentProblem, match=r"WORLD_SIZE=3 but the plan says 2 processes"):
        RunContext(plan)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there_is_told_with_what_torch_sees() -> None:
    plan = WorkerPlan("train", tiny_config(), "torchrun", "cuda", 1, 1, 1)
    with pytest.raises(EnvironmentProblem, match=r"device: cuda, but torch sees no GPU: .*built for"):
        RunContext(plan)


def test_process_ends_with_its_parent() -> None:
    reading, writing = os.pipe()

    def child() -> int:
        die_with_parent()
        signal.signal(signal.SIGALRM, lambda *_: os.write(writing, b"still here"))
        signal.alarm(60)
        os.write(writing, b"x")
        signal.pause()
        return 0

    def parent() -> int:
        fork(child)
        os.read(reading, 1)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    pid = fork(parent)
    os.close(writing)
    assert exit_statuses([pid]) == [-signal.SIGKILL]
    assert os.read(reading, 10) == b""  # the end of the pipe: nobody holds it any more
    os.close(reading)


def test_a_process_whose_parent_has_ended_already_does_not_begin() -> None:
    def begins() -> int:
        die_with_parent(os.getpid())  # no parent of ours: as if it had ended, and another process had taken us over
        return 0

    assert exit_statuses([fork(begins)]) == [1]
