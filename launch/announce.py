"""What the launcher says of a run before its ranks speak, and of one that has nothing left to do."""

from collections.abc import Mapping
from typing import Any

from configs.derive import counted
from configs.run_dir import RunDir
from configs.schema import RunConfig
from launch.backends import JOIN_TIMEOUT_S
from launch.follow import say, shown
from launch.options import Options
from launch.plan import LaunchPlan


def announce(plan: LaunchPlan, run: RunDir, endpoint: str | None, *, is_first: bool) -> None:
    """Before an attempt; what holds for all of them only before the first."""
    if is_first:
        say(f"{plan.device_line}; {counted(plan.worker.threads_per_rank, 'thread')} each ({plan.threads_note})")
    say(f"run {run.name} in {shown(run.path, plan.cwd)}, attempt {plan.attempt.path.name}")
    if not is_first:
        return
    for warning in plan.warnings:
        say(f"note: {warning}")
    if plan.nnodes > 1:
        say(f"node {plan.node_rank} of {plan.nnodes}: waiting for the others at {endpoint}, up to {JOIN_TIMEOUT_S} s")
        say("progress shows on the node that gets rank 0")


def say_finished(run: RunDir, config: RunConfig, result: Mapping[str, Any], options: Options) -> None:
    """And how to train on."""
    from launch.runs_table import describe_result

    if result.get("stopped_early"):
        say(f"run {run.name} ended early: {describe_result(result)}")
        say(f"to go on: {options.resume_command(run.name, 'early_stopping.patience=null --allow-changes')}")
        return
    more = f"max_epochs={config.max_epochs * 2}" if config.max_epochs else f"max_steps={(config.max_steps or 1) * 2}"
    say(f"run {run.name} is finished: {describe_result(result)}")
    say(f"to extend it: {options.resume_command(run.name, f'{more} --allow-changes')}")
