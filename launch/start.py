"""What the commands do, in order: load, plan, check, claim a folder, start, judge."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configs.errors import EXIT_DONE, ConfigError
from configs.known_models import is_published
from configs.loader import LoadedConfig, load_config
from configs.run_dir import AttemptDir, RunDir
from launch import preflight, run_folder
from launch.announce import announce, say_finished
from launch.compiling import settle_compile
from launch.evaluation import load_for_evaluation
from launch.follow import say, shown
from launch.meeting import meeting_folder
from launch.options import ROOT, Options, parse_checkpoint, parse_nodes, parse_nproc, together
from launch.plan import LaunchPlan, plan_launch
from launch.report import Verdict, conclude, stopped_between
from launch.request import Request
from launch.restart import Failure, Restart, judge, summary
from launch.run_folder import NameRequest
from launch.signals import StopSignals, ignore_stops
from launch.supervise import run_attempt
from launch.topology import Topology, detect_topology, find_torch_version

PLACEHOLDER = Path("/tmp/lockstep-XXXXXXXX")  # noqa: S108 - shown by `plan`, never opened
Probe = Callable[[LaunchPlan, Mapping[str, str], str], dict[str, Any]]


@dataclass(frozen=True)
class _Job:
    """Everything known before a folder is claimed."""

    loaded: LoadedConfig
    topology: Topology
    request: Request
    plan: LaunchPlan


def train(config: Path, options: Options) -> int:
    """Start a run, or go on with the one that --run-name names."""
    naming = NameRequest(config.stem, options.name, options.fresh)
    return _start(_plan_training(lambda: load_config(config, options.overrides), naming, options), naming, options)


def resume(name: str, options: Options) -> int:
    """Go on with a run by its own settings and, if not told otherwise, as many processes as the last time."""
    run, options, naming = _resumed(name, options)
    return _start(_plan_training(lambda: load_config(run.config, options.overrides), naming, options), naming, options)


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
    job = _job(loaded, request, options)
    preflight.check_torch(find_torch_version())
    preflight.check_disk(options.cwd / options.runs)
    if data is None:
        preflight.check_folders(job.plan.config, options.cwd)
    preflight.check_open_files(job.plan)
    run = RunDir(options.cwd / run.path)
    attempt = run_folder.make_attempt(run, prefix="eval-")
    return _finish(_attempt(job, run, attempt, options, StopSignals(), is_first=True)[1])


def _resumed(name: str, options: Options) -> tuple[RunDir, Options, NameRequest]:
    run = run_folder.find_run(options.runs, name)
    before = run_folder.last_plan(run)
    launcher = options.launcher or before.get("launcher")
    launcher = "torchrun" if launcher in (None, "direct") else launcher
    nproc = options.nproc if options.nproc is not None else str(before.get("local_world_size", 1))
    options = dataclasses.replace(options, launcher=launcher, nproc=nproc, name=run.name)
    return run, options, NameRequest(run.name, run.name)


def _plan_training(load: Callable[[], LoadedConfig], naming: NameRequest, options: Options) -> _Job:
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
    return _job(loaded, request, options)


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


def _job(loaded: LoadedConfig, request: Request, options: Options) -> _Job:
    topology = detect_topology(options.environ)
    return _Job(loaded, topology, request, plan_launch(loaded.config, topology, request))


def _show(job: _Job, options: Options, probes: Sequence[Probe]) -> int:
    from launch.render import render_plan

    run = RunDir(job.request.attempt.path.parent.parent)
    run_folder.check_settings(run, job.loaded.config, allow_changes=options.allow_changes)
    if probes:
        preflight.check_torch(find_torch_version())
    measured = {name: value for ask in probes for name, value in ask(job.plan, options.environ, options.worker).items()}
    note = " (goes on)" if run.config.is_file() else " (new)"
    say(render_plan(job.plan, job.topology, job.loaded.origins, measured, note))
    return EXIT_DONE


def _start(job: _Job, naming: NameRequest, options: Options) -> int:
    """Check the machine, claim the folder, and train in it."""
    preflight.check_torch(find_torch_version())
    preflight.check_disk(options.cwd / options.runs)
    preflight.check_folders(job.plan.config, options.cwd)
    preflight.check_model(job.plan.config, options.cwd, is_new=_is_new(RunDir(job.request.attempt.path.parent.parent)))
    preflight.check_teacher(job.plan.config, options.cwd)
    preflight.check_open_files(job.plan)
    if job.request.nodes and job.plan.worker.launcher == "torchrun":
        preflight.check_rendezvous(job.request.nodes)
    node_rank = options.node_rank
    run = run_folder.claim_name(options.cwd / options.runs, naming)
    with run_folder.locked(run, node_rank):
        changed = run_folder.check_settings(run, job.loaded.config, allow_changes=options.allow_changes)
        result = run_folder.finished_result(run)
        if result is not None and not changed:
            say_finished(run, job.loaded.config, result, options)
            return EXIT_DONE
        if changed:
            say(f"note: other settings than before: {'; '.join(changed)}")
        return _train(job, run, options)


def _train(job: _Job, run: RunDir, options: Options) -> int:
    """From here on the folder is ours: attempt after attempt, until one ends the run or another would not help."""
    signals, failures, restarts = StopSignals(), list[Failure](), list[Restart]()
    while True:
        attempt = _open_attempt(job, run, options, restarts)
        plan, verdict = _attempt(job, run, attempt, options, signals, is_first=not restarts)
        run_folder.record_verdict(attempt, verdict.lines)
        if restarts:
            restarts[-1] = run_folder.settle_restart(restarts[-1], attempt)
        if verdict.failure is None or plan.nnodes > 1:
            return _finish(verdict, restarts)
        failures.append(verdict.failure)
        batches = plan.worker.batches
        decision = judge(failures, plan.config.launch, batches.max_micro_batch, batches.unit)
        if not decision.again:
            return _finish(verdict, restarts, decision.why)
        for line in verdict.facts:
            say(line, to_stderr=True)
        if decision.max_micro_batch is not None:
            _remember(run, plan, decision.max_micro_batch)
        step = run_folder.newest_step(run)
        restart = Restart(attempt.path.name, verdict.failure, step, decision.wait_s, decision.max_micro_batch)
        if signals.name is None:
            say(restart.announce(decision))
            signals.wait(decision.wait_s, run.stop)
        if signals.name is not None:
            return _finish(stopped_between(signals.name, step, options.resume_command(run.name)), restarts)
        restarts.append(restart)


def _open_attempt(job: _Job, run: RunDir, options: Options, restarts: Sequence[Restart]) -> AttemptDir:
    """The next attempt's folder. Settings that the one before brought and did not get to commit come along."""
    changed = run_folder.check_settings(run, job.loaded.config, allow_changes=True)
    attempt = run_folder.make_attempt(run, node_rank=options.node_rank)
    run_folder.record_settings(run, attempt, job.loaded.config, changed=bool(changed))
    if restarts:
        run_folder.record_restart(restarts[-1], attempt)
    return attempt


def _remember(run: RunDir, plan: LaunchPlan, size: int) -> None:
    before, file = plan.worker.batches.max_micro_batch, shown(run.micro_batch, plan.cwd)
    run_folder.remember_micro_batch(run, size, f"attempt {plan.attempt.path.name} ran out of memory with {before}")
    say(
        f"a micro-batch of {before} does not fit in memory: at most {size} from now on, accumulated to the same global "
        f"batch of the same samples; remembered in {file}, delete it to forget"
    )


def _attempt(
    job: _Job, run: RunDir, attempt: AttemptDir, options: Options, signals: StopSignals, *, is_first: bool
) -> tuple[LaunchPlan, Verdict]:
    """Write the plan, prepare the data, start the ranks, judge how it ended."""
    with meeting_folder() as meeting:
        remembered = run_folder.remembered_micro_batch(run)
        request = dataclasses.replace(
            job.request, run_name=run.name, attempt=attempt, meeting=meeting, max_micro_batch=remembered
        )
        plan = plan_launch(job.loaded.config, job.topology, request)
        for name, text in plan.files.items():
            (attempt.path / name).write_text(text, encoding="utf-8")
        _save(plan)
        announce(plan, run, options.endpoint, is_first=is_first)
        fetches_weights = is_published(plan.config.model.weights) and _is_new(run)
        if is_first and (fetches_weights or preflight.data_missing(plan.config, plan.cwd)):
            code = preflight.prepare_data(plan, options.environ, f"{options.worker}.prepare")
            if code != EXIT_DONE:
                return plan, Verdict(code, [])
        settled = settle_compile(plan, run, options.environ, options.worker, may_measure=is_first)
        if settled is not plan:
            written = attempt.plan.stat()
            _save(settled)
            os.utime(attempt.plan, ns=(written.st_atime_ns, written.st_mtime_ns))  # the account of time starts there
        return settled, _run(settled, run, options, signals)


def _is_new(run: RunDir) -> bool:
    """Whether there is no checkpoint to go on from."""
    return run_folder.newest_step(run) is None


def _save(plan: LaunchPlan) -> None:
    plan.worker.save(plan.attempt.plan, command=plan.argv, environment=plan.environment, node_rank=plan.node_rank)


def _run(plan: LaunchPlan, run: RunDir, options: Options, signals: StopSignals) -> Verdict:
    signals.note()  # and from now on: what comes between two attempts counts as well
    ending = run_attempt(plan, options.environ, signals)
    again = options.resume_command(run.name) if plan.nnodes == 1 else "the same command on every node"
    return conclude(plan, ending, again)


def _finish(verdict: Verdict, restarts: Sequence[Restart] = (), why: str = "") -> int:
    """Say how the run ended; returns the exit code. A signal changes nothing any more."""
    ignore_stops()
    past = summary(restarts)
    lines = (
        [*verdict.facts, *([why] if why else []), *past, *verdict.hints] if verdict.failure else past + verdict.lines
    )
    for line in lines:
        say(line, to_stderr=verdict.to_stderr)
    return verdict.exit_code
