"""What the user reads last: done, stopped, or the first real failure with its log and at most one hint."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.contract import OUT_OF_MEMORY, Outcome
from configs.errors import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_ENVIRONMENT,
    EXIT_TRAINING,
    CheckpointError,
    ConfigError,
    EnvironmentProblem,
    TrainingError,
)
from configs.run_dir import AttemptDir, RunDir, step_name
from launch.follow import shown
from launch.plan import LaunchPlan
from launch.restart import Failure
from launch.run_folder import newest_step, step_reached
from launch.signals import exit_code_of, signal_words
from launch.supervise import Ending, load_outcome, read_pids
from launch.watch import Hang

AGENT_REPORT = re.compile(
    r"exitcode *: *(-?\d+) .*?\(pid: (\d+)\)|failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)"
)
ACCELERATE_REPORT = re.compile(r"returned non-zero exit status (\d+)|died with <Signals\.\w+: (\d+)>")
ERROR_LINE = re.compile(r"(?:[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*|Fatal Python error.*|.*No module named.*)")
TAIL_BYTES = 16_384
HINT = "hint: "
USER_ERRORS = (ConfigError.kind, CheckpointError.kind)


@dataclass(frozen=True)
class Verdict:
    """Exit code and the last lines; `to_stderr` if they tell of a failure."""

    exit_code: int
    lines: list[str]
    to_stderr: bool = True
    failure: Failure | None = None
    """What a restart is judged by; None where nothing failed."""

    @property
    def facts(self) -> list[str]:
        return [line for line in self.lines if not line.startswith(HINT)]

    @property
    def hints(self) -> list[str]:
        """What to do by hand."""
        return [line for line in self.lines if line.startswith(HINT)]


def conclude(plan: LaunchPlan, ending: Ending, resume_command: str) -> Verdict:
    """Judge an attempt from its outcome files and from what the launcher saw."""
    attempt = plan.attempt
    pids = read_pids(attempt)
    ranks = range(plan.worker.world_size) if plan.nnodes == 1 else sorted(pids)
    outcomes = {rank: load_outcome(attempt, rank) for rank in ranks}
    ended = [outcome for outcome in outcomes.values() if outcome]
    failed = sorted((outcome for outcome in ended if outcome.status == "failed"), key=lambda outcome: outcome.time)
    hint = _resume_hint(attempt, resume_command)
    if ending.hang:
        return _hung(plan, ending.hang, pids, hint)
    first = next((outcome for outcome in failed if outcome.kind != "peer"), None)
    # Not every victim's error is known to be one: what failed after a rank had died failed because of that.
    if first and first.time <= min(ending.died.values(), default=float("inf")):
        return _failed(plan, failed, first, pids, hint)
    if plan.worker.launcher != "direct" and ending.child_code < 0 and ending.killed is None:
        said = f"{_starter(plan)} was {signal_words(ending.child_code)}"
        failure = _failure(plan, ended, said, said)
        line = f"FAILED: {said}; its ranks ended with it"
        return Verdict(EXIT_TRAINING, [line, f"log: {shown(attempt.agent_log, plan.cwd)}", *hint], failure=failure)
    if ending.died:
        return _died(plan, ending, pids, ended, hint)
    if ending.killed in ("grace", "second Ctrl-C", "nothing to save") and len(ended) < len(outcomes):
        return _killed_while_stopping(plan, ending, hint)
    if failed:
        return _failed(plan, failed, failed[0], pids, hint)
    if len(ended) < len(outcomes) or not ended:
        return _never_started(plan, ending) if not pids else _died(plan, ending, pids, ended, hint)
    if stopped := [outcome for outcome in ended if outcome.status == "stopped"]:
        # A signal that went to one rank only is known to that rank alone.
        return _stopped(ending, next((outcome for outcome in stopped if outcome.signal), stopped[0]), resume_command)
    return Verdict(EXIT_DONE, [], to_stderr=False)


def stopped_between(name: str, newest: int | None, resume_command: str) -> Verdict:
    """A stop signal came when an attempt had failed and the next one had not begun."""
    place = "no checkpoint" if newest is None else f"checkpoint {step_name(newest)}"
    line = f"stopped by {name} before the restart; {place}; go on with: {resume_command}"
    return Verdict(exit_code_of(name), [line], to_stderr=False)


def _failed(
    plan: LaunchPlan, failed: Sequence[Outcome], first: Outcome, pids: dict[int, int], hint: list[str]
) -> Verdict:
    """`first` of those that failed is to blame."""
    others = [] if first.kind == "peer" else _others(failed, first.rank)
    alike = [outcome for outcome in failed if (outcome.kind, outcome.message) == (first.kind, first.message)]
    agree = first.kind == TrainingError.kind and len(alike) == plan.worker.world_size > 1
    code = first.exit_code or EXIT_TRAINING
    kind, message = first.kind or "error", (first.message or "").strip()
    log = f"log: {shown(plan.attempt.rank_log(first.rank), plan.cwd)}"
    cause = message if kind in (TrainingError.kind, "peer") else f"{kind}: {message}" if message else kind
    failure = Failure(kind, cause.partition("\n")[0], first.rank, first.step, exit_code=code)
    if kind in USER_ERRORS:
        lines = [f"{kind}: {line}" if line[:1].strip() else line for line in message.splitlines()]
        return Verdict(code, lines, failure=failure)
    if kind == EnvironmentProblem.kind:
        lines = [f"{kind}: {message} ({_rank(plan, first.rank, {})}{_at(first)})", log, *hint]
        return Verdict(code, lines, failure=failure)
    where = f" ({first.where})" if first.where and kind != TrainingError.kind else ""
    who = _rank(plan, first.rank, pids)
    if agree:  # what the ranks found out together is nobody's own
        who, others = f"all {plan.worker.world_size} ranks", []
    lines = [f"FAILED: {who}{_at(first)}: {cause}{where}", *_because(others), log]
    return Verdict(code, lines + (_memory_hint(plan, first) or hint), failure=failure)


def _failure(
    plan: LaunchPlan, ended: Sequence[Outcome], kind: str, said: str, rank: int | None = None, code: int = EXIT_TRAINING
) -> Failure:
    """Of what left no outcome itself: the step is that of its last beat, else that of those who waited for it."""
    step = step_reached(plan.attempt, rank)
    if step is None:
        step = max((outcome.step for outcome in ended if outcome.step is not None), default=None)
    return Failure(kind, said, rank, step, exit_code=code)


def _hung(plan: LaunchPlan, hang: Hang, pids: dict[int, int], hint: list[str]) -> Verdict:
    rank = min(pids, default=0) if hang.rank is None else hang.rank
    log = shown(plan.attempt.rank_log(rank), plan.cwd)
    stacks = f"stacks: at the end of each rank's log in {shown(plan.attempt.logs, plan.cwd)}"
    failure = Failure("hang", hang.sentence, hang.rank, hang.step)
    return Verdict(EXIT_TRAINING, [f"FAILED: {hang.sentence}", f"log: {log}", stacks, *hint], failure=failure)


def _died(plan: LaunchPlan, ending: Ending, pids: dict[int, int], ended: Sequence[Outcome], hint: list[str]) -> Verdict:
    """A rank that left no outcome: killed, crashed in native code, or ended before it could say anything."""
    codes = _exit_codes(plan, ending, pids)
    missing = [rank for rank in pids if load_outcome(plan.attempt, rank) is None]
    suspects = [*ending.died, *missing]
    # torchrun ends the others with SIGTERM once the first is gone; that is no cause.
    guilty = [rank for rank in suspects if codes.get(rank) not in (None, -signal.SIGTERM)]
    first = (guilty or suspects or [0])[0]
    cause = signal_words(codes[first]) if first in codes else "ended without a word"
    log = plan.attempt.rank_log(first)
    last = _last_error(log) or (_last_line(log) if first and codes.get(first, 0) >= 0 else None)
    code = codes[first] if codes.get(first) in (EXIT_CONFIG, EXIT_ENVIRONMENT) else EXIT_TRAINING
    because = _because(_others(ended, first))
    failure = _failure(plan, ended, _kind(last, codes.get(first, 0)) or cause, cause, first, code)
    step = "" if failure.step is None else f" at step {failure.step}"
    lines = [f"FAILED: {_rank(plan, first, pids)}{step}: {cause}", *([f"its last line: {last}"] if last else [])]
    return Verdict(code, [*lines, *because, f"log: {shown(log, plan.cwd)}", *hint], failure=failure)


def _never_started(plan: LaunchPlan, ending: Ending) -> Verdict:
    direct = plan.worker.launcher == "direct"
    log = plan.attempt.rank_log(0) if direct else plan.attempt.agent_log
    who = _starter(plan)
    last = _last_error(log) or _last_line(log)
    lines = [f"FAILED: {who} ended before any rank had started: {signal_words(ending.child_code)}"]
    lines += [f"its last line: {last}"] if last else []
    lines.append(f"log: {shown(log, plan.cwd)}")
    if plan.nnodes > 1:
        this = f"this was node {plan.node_rank} of {plan.nnodes}"
        lines.append(f"hint: {this}; start all of them, with the same --nnodes, --rdzv-endpoint and --run-name")
    words = signal_words(ending.child_code)
    failure = _failure(plan, [], _kind(last, ending.child_code) or words, f"{who} ended before any rank, {words}")
    return Verdict(EXIT_TRAINING, lines, failure=failure)


def _kind(last_line: str | None, exit_code: int) -> str | None:
    """The class of the error that a process without an outcome ended with; None if it was killed or said none."""
    return last_line.partition(":")[0] if last_line and exit_code >= 0 and ERROR_LINE.fullmatch(last_line) else None


def _killed_while_stopping(plan: LaunchPlan, ending: Ending, hint: list[str]) -> Verdict:
    assert ending.signal is not None
    if ending.killed == "nothing to save":
        return Verdict(exit_code_of(ending.signal), [f"stopped by {ending.signal}: the evaluation was not finished"])
    late = f"not done after {plan.config.launch.grace_s:g} s (launch.grace_s)"
    after = late if ending.killed == "grace" else "second Ctrl-C"
    line = f"stopped by {ending.signal}: {after}, all processes were killed"
    # A Ctrl-C that had to force a SIGTERM's stop is a Ctrl-C.
    name = "SIGINT" if ending.killed == "second Ctrl-C" else ending.signal
    return Verdict(exit_code_of(name), [line, *(hint or ["hint: there is no checkpoint to go on from"])])


def _stopped(ending: Ending, stopped: Outcome, resume_command: str) -> Verdict:
    name = ending.signal or stopped.signal or "SIGTERM"
    saved = f"checkpoint {stopped.checkpoint}; go on with: {resume_command}" if stopped.checkpoint else "no checkpoint"
    step = "" if stopped.step is None else f" at step {stopped.step}"
    return Verdict(exit_code_of(name), [f"stopped by {name}{step}; {saved}"], to_stderr=False)


def _starter(plan: LaunchPlan) -> str:
    """What the launcher started itself."""
    names = {"direct": "the process", "fork": "the process that forks the ranks"}
    return names.get(plan.worker.launcher, plan.worker.launcher)


def _rank(plan: LaunchPlan, rank: int, pids: dict[int, int]) -> str:
    pid = f" (pid {pids[rank]})" if rank in pids else ""
    return f"rank {rank} of {plan.worker.world_size}{pid}"


def _at(outcome: Outcome) -> str:
    if outcome.step is None:
        return ""
    return f" at step {outcome.step}" if outcome.epoch is None else f" at epoch {outcome.epoch} step {outcome.step}"


def _others(ended: Sequence[Outcome], first: int) -> list[int]:
    return sorted(outcome.rank for outcome in ended if outcome.rank != first and outcome.status == "failed")


def _because(others: Sequence[int]) -> list[str]:
    if not others:
        return []
    ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    return [f"{ranks} stopped because of it"]


def _resume_hint(attempt: AttemptDir, resume_command: str) -> list[str]:
    newest = newest_step(RunDir(attempt.path.parent.parent))
    return [] if newest is None else [f"hint: go on from {step_name(newest)} with: {resume_command}"]


def _memory_hint(plan: LaunchPlan, first: Outcome) -> list[str]:
    """Where a smaller micro-batch can help: not before training, and not below one sample, or those that are mixed."""
    batches = plan.worker.batches
    if first.kind != OUT_OF_MEMORY or first.step is None or batches.max_micro_batch <= batches.unit:
        return []
    return ["hint: max_per_device_batch_size=N accumulates smaller micro-batches; the results stay the same"]


def _exit_codes(plan: LaunchPlan, ending: Ending, pids: dict[int, int]) -> dict[int, int]:
    if plan.worker.launcher == "direct":
        return {0: ending.child_code}
    text = _tail(plan.attempt.agent_log)
    if alone := ACCELERATE_REPORT.findall(text):  # accelerate launch with one process
        exit_status, number = alone[-1]
        return {0: int(exit_status) if exit_status else -int(number)}
    by_pid: dict[int, int] = {}
    for code, pid, code_too, pid_too in AGENT_REPORT.findall(text):
        by_pid.setdefault(int(pid or pid_too), int(code or code_too))
    return {rank: by_pid[pid] for rank, pid in pids.items() if pid in by_pid}


def _last_error(log: Path) -> str | None:
    lines = [line.strip() for line in _tail(log).splitlines() if ERROR_LINE.fullmatch(line.strip())]
    return lines[-1] if lines else None


def _last_line(log: Path) -> str | None:
    lines = [line.strip() for line in _tail(log).splitlines() if line.strip()]
    return lines[-1] if lines else None


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
