"""compile: auto in the launcher, with a measurement that is only pretended."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from configs.errors import TrainingError
from configs.run_dir import RunDir
from configs.schema import RunConfig
from launch import compiling
from launch.compiling import settle_compile
from launch.plan import LaunchPlan, plan_launch
from tests.unit.test_launch_plan import CPU, REQUEST

PAYS = {"compile": True, "why": "auto: 6 ms a step, 10 without"}
Asked = list[LaunchPlan]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The plans that were measured."""
    found: Asked = []

    def measure(plan: LaunchPlan, _environ: Any, _worker: str) -> dict[str, Any]:
        found.append(plan)
        return dict(PAYS)

    monkeypatch.setattr(compiling, "probe_compile", measure)
    return found


def planned(compile_it: Any = "auto", **request: Any) -> LaunchPlan:
    config = RunConfig(max_epochs=1, global_batch_size=8, compile=compile_it)
    return plan_launch(config, CPU, dataclasses.replace(REQUEST, **request))


def settled(plan: LaunchPlan, run: RunDir, *, may_measure: bool = True) -> LaunchPlan:
    return settle_compile(plan, run, {}, "trainer", may_measure=may_measure)


def test_what_was_measured_holds_for_the_run(tmp_path: Path, asked: Asked) -> None:
    run, plan = RunDir(tmp_path), planned()
    for may_measure in (True, True, False):
        worker = settled(plan, run, may_measure=may_measure).worker
        assert (worker.compiles, worker.compile_reason) == (True, PAYS["why"])
    assert asked == [plan]
    assert json.loads(run.compile_choice.read_text(encoding="utf-8")) == PAYS | {"device": "cpu"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"compile": 1}', json.dumps(PAYS | {"device": "cuda"})])
def test_what_holds_for_another_device_or_is_junk_is_measured_again(tmp_path: Path, asked: Asked, text: str) -> None:
    run = RunDir(tmp_path)
    run.compile_choice.write_text(text, encoding="utf-8")
    assert not settled(planned(), run, may_measure=False).worker.compiles
    assert settled(planned(), run).worker.compiles
    assert len(asked) == 1


def test_a_measurement_that_is_killed_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> dict[str, Any]:
        raise TrainingError("the probe failed with exit code -9; its own message is above")

    monkeypatch.setattr(compiling, "probe_compile", killed)
    worker = settled(planned(), RunDir(tmp_path)).worker
    assert not worker.compiles
    assert worker.compile_reason == "auto: the probe failed with exit code -9; its own message is above"


@pytest.mark.parametrize("compile_it", [True, False])
def test_the_users_word_is_not_measured(tmp_path: Path, asked: Asked, compile_it: bool) -> None:
    plan = planned(compile_it)
    assert settled(plan, RunDir(tmp_path)) is plan
    assert plan.worker.compiles == compile_it
    assert asked == []


def test_an_evaluation_and_several_nodes_do_without(tmp_path: Path, asked: Asked) -> None:
    assert not settled(planned(mode="eval"), RunDir(tmp_path)).worker.compiles
    nodes = dataclasses.replace(planned(), nnodes=2)
    worker = settled(nodes, RunDir(tmp_path)).worker
    assert (worker.compiles, worker.compile_reason) == (False, "auto: not measured for several nodes")
    assert asked == []
