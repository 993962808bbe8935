"""`plan --probe`, `--probe-batch`, `compile: auto`: a helper with torch measures what the launcher cannot know."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import EXIT_CONFIG, EXIT_ENVIRONMENT, TrainingError
from launch.plan import LaunchPlan
from launch.preflight import run_helper


def probe(plan: LaunchPlan, environ: Mapping[str, str], worker: str = "trainer") -> dict[str, Any]:
    """Parameters, checkpoint bytes, one step's time and memory, samples."""
    return _ask("--probe", plan, environ, worker)


def probe_batch(plan: LaunchPlan, environ: Mapping[str, str], worker: str = "trainer") -> dict[str, Any]:
    """The largest micro-batch that fits in memory, a rank's share of the batch, and whether it is an estimate."""
    return _ask("--probe-batch", plan, environ, worker)


def probe_compile(plan: LaunchPlan, environ: Mapping[str, str], worker: str = "trainer") -> dict[str, Any]:
    """Whether torch.compile pays (`compile`), and the reason (`why`)."""
    return _ask("--probe-compile", plan, environ, worker)


def _ask(what: str, plan: LaunchPlan, environ: Mapping[str, str], worker: str) -> dict[str, Any]:
    """The answer of a helper that leaves no run folder. Exits with its code where it could not be had."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        plan_file = Path(folder) / "plan.json"
        plan.worker.save(plan_file)
        command = [plan.argv[0], "-m", f"{worker}.prepare", what, str(plan_file)]
        code, text = run_helper(command, plan, environ, capture=True)
    if code in (EXIT_CONFIG, EXIT_ENVIRONMENT):
        raise SystemExit(code)  # it has said why, in one sentence
    if code != 0:
        raise TrainingError(f"the probe failed with exit code {code}; its own message is above")
    measured: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return measured
