"""What the commands do, in order: load, plan, and show it or go on to attempts.py."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from configs.errors import EXIT_DONE, ConfigError
from configs.loader import LoadedConfig, load_config
from configs.run_dir import RunDir
from launch import preflight, run_folder
from launch.evaluation import load_for_evaluation
from launch.follow import say
from launch.options import ROOT, Options, parse_checkpoint, parse_nodes, parse_nproc, together
from launch.plan import LaunchPlan
from launch.ready import Ready, make_ready
from launch.request import Request
from launch.run_folder import NameRequest
from launch.signals import StopSignals
from launch.topology import find_torch_version

PLACEHOLDER = Path("/tmp/lockstep-XXXXXXXX")  # noqa: S108 - shown by `plan`, never opened
Probe = Callable[[LaunchPlan, Mapping[str, str], str], dict[str, Any]]


def train(config: Path, options: Options) -> int:
    """Start a run, or go on with the one that --run-name names."""
    naming = NameRequest(config.stem, options.name, options.fresh)
    return _begin(_plan_training(lambda: load_config(config, options.overrides), naming, options), naming, options)


def resume(name: str, options: Options) -> int:
    """Go on with a run by its own settings and, if not told otherwise, as many processes as the last time."""
    run, options, naming = _resumed(name, options)
    return _begin(_plan_training(lambda: load_config(run.config, options.overrides), naming, options), naming, options)


def _begin(ready: Ready, naming: NameRequest, options: Options) -> int:
    from launch import attempts  # 15 ms that `plan` and a typo do without

    return attempts.start(ready, naming, options)


def show_plan(config: Path, options: Options, *, probes: Sequence[Probe] = ()) -> int:
    """Print what `train` would do; nothing is written."""
    naming = NameRequest(config.stem, options.name, options.fresh)
    return _show(_plan_training(lambda: load_config(config, options.overrides), naming, options), options, probes)


def evaluate(name: str, checkpoint: str, options: Options, data: Path | None = None) -> int:
    """Evaluate a checkpoint of a run, on the images of the folder `data` if it is given. Takes no lock: a run that goes
    on is not disturbed."""
    run = run_folder.find_run(options.runs, name)
    (loaded, changed), nproc, checkpoint = together(
        lambda: load_for_evaluation(run, options, data),
        lambda: parse_nproc(options.nproc),
        lambda: parse_checkpoint(checkpoint),
    )
    if run_folder.newest_step(run) is None:
        raise ConfigError(f"run {run.name!r} has no checkpoint yet, so there is nothing to evaluate")
    request = dataclasses.replace(
        _request(run.name, "eval-", nproc, options),
        mode="eval",
        checkpoint=checkpoint,
        eval_data=None if data is None else str(options.cwd / data),
        eval_changes=changed,
    )
    job = make_ready(loaded, request, options)
    preflight.check_torch(find_torch_version())
    preflight.check_disk(options.cwd / options.runs)
    if data is None:
        preflight.check_folders(job.plan.config, options.cwd)
    preflight.check_open_files(job.plan)
    run = RunDir(options.cwd / run.path)
    attempt = run_folder.make_attempt(run, prefix="eval-")
    from launch import attempts

    return attempts.finish(attempts.attempt_once(job, run, attempt, options, StopSignals(), is_first=True)[1])


def _resumed(name: str, options: Options) -> tuple[RunDir, Options, NameRequest]:
    run = run_folder.find_run(options.runs, name)
    before = run_folder.last_plan(run)
    launcher = options.launcher or before.get("launcher")
    launcher = "torchrun" if launcher in (None, "direct") else launcher
    nproc = options.nproc if options.nproc is not None else str(before.get("local_world_size", 1))
    options = dataclasses.replace(options, launcher=launcher, nproc=nproc, name=run.name)
    return run, options, NameRequest(run.name, run.name)


def _plan_training(load: Callable[[], LoadedConfig], naming: NameRequest, options: Options) -> Ready:
    """All that is wrong with the config, the name and the options is told at once."""
    loaded, nproc, name, nodes = together(
        load,
        lambda: parse_nproc(options.nproc),
        lambda: run_folder.choose_name(options.runs, naming),
        lambda: parse_nodes(options),
    )
    request = dataclasses.replace(_request(name, "", nproc, options), nodes=nodes)
    if nodes:
        request = dataclasses.replace(request, interface=preflight.interface_of(nodes.local_addr))
    return make_ready(loaded, request, options)


def _request(name: str, prefix: str, nproc: int | Literal["auto"], options: Options) -> Request:
    run = RunDir(options.cwd / options.runs / name)
    return Request(
        run_name=name,
        attempt=run.attempt(run_folder.next_label(run, prefix=prefix, node_rank=options.node_rank)),
        meeting=PLACEHOLDER,
        python=options.python,
        root=ROOT,
        cwd=options.cwd,
        environ=options.environ,
        nproc=nproc,
        launcher=options.launcher or "torchrun",
        terminal=_terminal(),
        started=options.started,
        worker=options.worker,
        allow_changes=options.allow_changes,
        max_micro_batch=run_folder.remembered_micro_batch(run),
    )


def _terminal() -> str | None:
    try:
        return os.ttyname(1)
    except OSError:
        return None


def _show(job: Ready, options: Options, probes: Sequence[Probe]) -> int:
    from launch.render import render_plan

    run = RunDir(job.request.attempt.path.parent.parent)
    run_folder.check_settings(run, job.loaded.config, allow_changes=options.allow_changes)
    if probes:
        preflight.check_torch(find_torch_version())
    measured = {name: value for ask in probes for name, value in ask(job.plan, options.environ, options.worker).items()}
    note = " (goes on)" if run.config.is_file() else " (new)"
    say(render_plan(job.plan, job.topology, job.loaded.origins, measured, note))
    return EXIT_DONE
