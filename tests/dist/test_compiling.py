"""compile: auto as the helper process measures it, and compiled training."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from configs.contract import WorkerPlan
from tests.dist.harness import finished, in_ranks, tiny_config
from trainer import compiling

COMPILE = nn.Module.compile


def measured(folder: Path, **changes: Any) -> dict[str, Any]:
    plan = WorkerPlan("train", tiny_config(compile="auto", **changes), "direct", "cpu", 1, 1, 1)
    (found,) = in_ranks(folder, 1, lambda _: compiling.measure_compile(plan))
    return found


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch._dynamo, but not a C++ compiler; and whether it was called decides how long a step takes."""
    calls: list[nn.Module] = []

    def compile_module(module: nn.Module) -> None:
        calls.append(module)
        COMPILE(module, backend="eager")

    def step(job: Any, batch: Any, pieces: Any) -> float:
        real(job, batch, pieces)
        is_eager = torch._dynamo.eval_frame._stance.stance == "force_eager"
        return 0.002 if calls and not is_eager else 0.010

    real = compiling.timed_step
    monkeypatch.setattr(nn.Module, "compile", compile_module)
    monkeypatch.setattr(compiling, "timed_step", step)


def test_it_pays_where_the_steps_bring_in_the_compilation(tmp_path: Path, compiled: None) -> None:
    # All the compiled steps take 2 ms, the first too: compiling takes nothing.
    assert measured(tmp_path, max_epochs=None, max_steps=5_000) == {
        "compile": True,
        "why": "auto: 2 ms a step, 10 without: 5000 steps save 40 s, compiling takes 0 s",
    }


def test_a_short_job_is_not_compiled_to_find_out(tmp_path: Path, compiled: None) -> None:
    # Two epochs of eight updates, whatever part of a batch one rank has.
    assert measured(tmp_path) == {
        "compile": False,
        "why": "auto: 16 steps of 10 ms are too few to pay for compiling",
    }


def test_a_network_that_cannot_be_compiled_is_trained_without(
    tmp_path: Path, compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: nn.Module) -> None:
        raise RuntimeError("no C++ compiler\nlong stack")

    monkeypatch.setattr(nn.Module, "compile", fail)
    assert measured(tmp_path, max_epochs=None, max_steps=5_000) == {
        "compile": False,
        "why": "auto: the measurement failed: RuntimeError: no C++ compiler",
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_worker_does_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    counter = itertools.count()
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: (next(counter), COMPILE(self, backend="eager"))[1])
    config, why = tiny_config(compile="auto"), "auto: 6 ms a step, 10 without"
    plain = finished(tmp_path / "off", config, world_size, compile_reason=why)
    assert f"compile    off ({why})" in plain.log()
    on = finished(tmp_path / "on", config, world_size, compile_pays=True, compile_reason=why)
    assert f"compile    on ({why})" in on.log()
    assert (plain.checkpoint().state["compile"], on.checkpoint().state["compile"]) == (False, True)
    # Not through a compiler, so the arithmetic is the same.
    assert all(torch.equal(tensor, plain.export()[name]) for name, tensor in on.export().items())


def test_a_resume_says_that_the_choice_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: COMPILE(self, backend="eager"))
    finished(tmp_path, tiny_config(compile="auto", max_epochs=1))
    again = finished(tmp_path, tiny_config(compile="auto"), compile_pays=True)
    assert "goes on elsewhere (compile False -> True): the same samples, not the same bits" in again.log()
