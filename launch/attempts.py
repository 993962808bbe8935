"""From a plan that is ready to the end of the run: check the machine, claim the folder, start, judge, start again."""

import dataclasses
import os
from collections.abc import Sequence

from configs.errors import EXIT_DONE
from configs.known_models import is_published
from configs.run_dir import AttemptDir, RunDir
from launch import preflight, run_folder
from launch.announce import announce, say_finished
from launch.compiling import settle_compile
from launch.follow import say, shown
from launch.meeting import meeting_folder
from launch.options import Options
from launch.plan import LaunchPlan, plan_launch
from launch.ready import Ready
from launch.report import Verdict, conclude, stopped_between
from launch.restart import Failure, Restart, judge, summary
from launch.run_folder import NameRequest
from launch.signals import StopSignals, ignore_stops
from launch.supervise import run_attempt
from launch.topology import find_torch_version


def start(job: Ready, naming: NameRequest, options: Options) -> int:
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
        return train(job, run, options)


def train(job: Ready, run: RunDir, options: Options) -> int:
    """From here on the folder is ours: attempt after attempt, until one ends the run or another would not help."""
    signals, failures, restarts = StopSignals(), list[Failure](), list[Restart]()
    while True:
        attempt = _open_attempt(job, run, options, restarts)
        plan, verdict = attempt_once(job, run, attempt, options, signals, is_first=not restarts)
        run_folder.record_verdict(attempt, verdict.lines)
        if restarts:
            restarts[-1] = run_folder.settle_restart(restarts[-1], attempt)
        if verdict.failure is None or plan.nnodes > 1:
            return finish(verdict, restarts)
        failures.append(verdict.failure)
        batches = plan.worker.batches
        decision = judge(failures, plan.config.launch, batches.max_micro_batch, batches.unit)
        if not decision.again:
            return finish(verdict, restarts, decision.why)
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
            return finish(stopped_between(signals.name, step, options.resume_command(run.name)), restarts)
        restarts.append(restart)


def _open_attempt(job: Ready, run: RunDir, options: Options, restarts: Sequence[Restart]) -> AttemptDir:
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


def attempt_once(
    job: Ready, run: RunDir, attempt: AttemptDir, options: Options, signals: StopSignals, *, is_first: bool
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


def finish(verdict: Verdict, restarts: Sequence[Restart] = (), why: str = "") -> int:
    """Say how the run ended; returns the exit code. A signal changes nothing any more."""
    ignore_stops()
    past = summary(restarts)
    lines = (
        [*verdict.facts, *([why] if why else []), *past, *verdict.hints] if verdict.failure else past + verdict.lines
    )
    for line in lines:
        say(line, to_stderr=verdict.to_stderr)
    return verdict.exit_code
