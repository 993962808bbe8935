"""compile: auto: measured once a run, before its first start, and remembered in its folder, so that a resume does the
same."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from configs.errors import TrainingError
from configs.run_dir import RunDir
from launch import run_folder
from launch.follow import say
from launch.plan import LaunchPlan
from launch.probe import probe_compile


def settle_compile(
    plan: LaunchPlan, run: RunDir, environ: Mapping[str, str], worker: str, *, may_measure: bool
) -> LaunchPlan:
    """The plan with what `auto` means for it."""
    if plan.config.compile != "auto" or plan.worker.mode == "eval":
        return plan
    if plan.nnodes > 1:  # each launcher would decide by itself
        return _with(plan, {"compile": False, "why": "auto: not measured for several nodes"})
    found = run_folder.remembered_compile(run, plan.worker.device)
    if found is None and may_measure:
        say("compile: auto: measuring a step with and without torch.compile; this may take a minute or two")
        try:
            found = probe_compile(plan, environ, worker)
        except TrainingError as error:  # killed, for one by a machine without memory: the run can do without
            found = {"compile": False, "why": f"auto: {error}"}
        run_folder.remember_compile(run, found, plan.worker.device)
    return plan if found is None else _with(plan, found)


def _with(plan: LaunchPlan, found: Mapping[str, Any]) -> LaunchPlan:
    worker = dataclasses.replace(plan.worker, compile_pays=found["compile"], compile_reason=found["why"])
    return dataclasses.replace(plan, worker=worker)
