"""Which folder a run gets, who may use it, and whether what lies there may go on."""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.beat import read_beat
from configs.contract import write_atomically
from configs.errors import ConfigError, EnvironmentProblem
from configs.run_dir import STEP_FOLDER, AttemptDir, RunDir, checked_run_name
from configs.schema import RunConfig
from launch.restart import Restart

LOCK_PATIENCE_S = 0.3
"""`runs` asks for a lock only to see whether it is held, and lets go at once."""


@dataclass(frozen=True)
class NameRequest:
    """What the user said about the name. `stem` is the config file's, for the numbered default."""

    stem: str
    name: str | None = None
    fresh: bool = False


def choose_name(runs: Path, request: NameRequest) -> str:
    """The name a run would get now. Reads only; `claim_name` makes it so."""
    if request.name is None:
        stem = re.sub(r"[^A-Za-z0-9._-]", "-", request.stem).lstrip("._-")[:80] or "run"
        return f"{stem}-{_highest(runs, _numbered(stem, digits=3)) + 1:03d}"
    name = checked_run_name(request.name)
    if not request.fresh or not (runs / name).exists():
        return name
    return f"{name}-{max(1, _highest(runs, _numbered(name))) + 1}"


def claim_name(runs: Path, request: NameRequest) -> RunDir:
    """Make the run's folder. A new name is nobody else's: mkdir decides between two that start at once."""
    while True:
        run = RunDir(runs / choose_name(runs, request))
        may_exist = request.name is not None and not request.fresh
        try:
            run.path.mkdir(parents=True, exist_ok=may_exist)
        except FileExistsError as error:
            if run.path.is_dir():
                continue
            raise EnvironmentProblem(f"{run.path} is a file; a run needs a folder of that name") from error
        except OSError as error:
            raise EnvironmentProblem(f"cannot make {run.path}: {error.strerror}; choose another --runs-dir") from error
        return run


def find_run(runs: Path, name: str) -> RunDir:
    """An existing run. `runs/NAME` is understood too: that is what completion on the command line gives."""
    run = RunDir(runs / checked_run_name(Path(name).name))
    if not run.path.is_dir():
        known = sorted(path.name for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
        there = f"there are {', '.join(known)}" if known else "it is empty"
        raise ConfigError(f"there is no run {run.name!r} in {runs}; {there}")
    if not run.config.is_file():
        raise ConfigError(f"{run.config} is missing: the run never started; use `train` with --run-name {run.name}")
    return run


@contextlib.contextmanager
def locked(run: RunDir, node_rank: int = 0) -> Iterator[None]:
    """Keep a second launch out of the folder; the lock ends with this process, however it ends."""
    path = run.lock if node_rank == 0 else run.path / f".lock-node{node_rank}"
    with path.open("a+", encoding="utf-8") as file:
        if not _try_lock(file.fileno(), LOCK_PATIENCE_S):
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ConfigError(
                f"run {run.name!r} is in use by another launch (pid {holder}); "
                "wait for it, stop it, or use another --run-name"
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def is_running(run: RunDir) -> bool:
    try:
        with run.lock.open("r", encoding="utf-8") as file:
            return not _try_lock(file.fileno(), 0.0, fcntl.LOCK_SH)
    except OSError:
        return False


def _try_lock(descriptor: int, patience_s: float, kind: int = fcntl.LOCK_EX) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)


def check_settings(run: RunDir, config: RunConfig, *, allow_changes: bool) -> list[str]:
    """The settings that differ from those the run was started with. Raises ConfigError unless they may."""
    if not run.config.is_file():
        return []
    from configs.loader import differences, load_config

    changed = differences(load_config(run.config).config, config)
    if changed and not allow_changes and newest_step(run) is not None:  # without a checkpoint nothing is at stake
        raise ConfigError(
            "\n  ".join([f"run {run.name!r} was started with other settings:", *changed])
            + "\nuse --allow-changes to go on with the new ones, or --fresh to start anew beside it"
        )
    return changed


def finished_result(run: RunDir) -> dict[str, Any] | None:
    """result.json of a run that is finished, else None."""
    result = read_json(run.result)
    return result if result.get("status") == "finished" else None


def record_settings(run: RunDir, attempt: AttemptDir, config: RunConfig, *, changed: bool) -> None:
    """Write a new run's config.yaml. Other settings wait in the attempt's folder: only the ranks know if they fit."""
    from configs.loader import dump_config

    if changed or not run.config.exists():
        write_atomically(attempt.config if changed else run.config, dump_config(config))


def next_label(run: RunDir, *, prefix: str = "", node_rank: int = 0) -> str:
    suffix = f"-node{node_rank}" if node_rank else ""
    number = _highest(run.path / "attempts", rf"{prefix}(\d+){suffix}") + 1
    return f"{prefix}{number:03d}{suffix}"


def make_attempt(run: RunDir, *, prefix: str = "", node_rank: int = 0) -> AttemptDir:
    """The folder of one more start of this run."""
    while True:
        attempt = run.attempt(next_label(run, prefix=prefix, node_rank=node_rank))
        try:
            attempt.logs.mkdir(parents=True)
        except FileExistsError as error:
            if attempt.path.exists():
                continue
            raise EnvironmentProblem(f"cannot make {attempt.path}: what is there is no folder") from error
        return attempt


def newest_step(run: RunDir) -> int | None:
    """Of the checkpoints, by name only: whether it is whole, the ranks find out."""
    names = (STEP_FOLDER.fullmatch(path.name) for path in run.checkpoints.glob("*"))
    return max((int(name[1]) for name in names if name), default=None)


def step_reached(attempt: AttemptDir, rank: int | None = None) -> int | None:
    """Updates that `rank` had completed, or whichever got furthest; None if it had not begun to train."""
    paths = attempt.path.glob("beat-rank*") if rank is None else [attempt.beat(rank)]
    beats = [beat for path in paths if (beat := read_beat(path))]
    return max((beat.step for beat in beats if beat.first_step >= 0), default=None)


def remembered_micro_batch(run: RunDir) -> int | None:
    """What an earlier attempt found to fit in memory; None if none ran out of it."""
    size = read_json(run.micro_batch).get("max_micro_batch")
    return size if isinstance(size, int) and size >= 1 else None


def remember_micro_batch(run: RunDir, size: int, why: str) -> None:
    write_atomically(run.micro_batch, json.dumps({"max_micro_batch": size, "why": why}, indent=1))


def remembered_compile(run: RunDir, device: str) -> dict[str, Any] | None:
    """What `compile: auto` was found to mean on this kind of device; None if nothing was measured."""
    found = read_json(run.compile_choice)
    is_whole = isinstance(found.get("compile"), bool) and isinstance(found.get("why"), str)
    return found if is_whole and found.get("device") == device else None


def remember_compile(run: RunDir, found: dict[str, Any], device: str) -> None:
    write_atomically(run.compile_choice, json.dumps(found | {"device": device}, indent=1))


def settle_restart(restart: Restart, attempt: AttemptDir) -> Restart:
    """With the checkpoint that the ranks of `attempt` did go on from: the newest one may have been damaged."""
    resumed = read_json(attempt.resumed)
    if not resumed:
        return restart
    settled = dataclasses.replace(restart, checkpoint_step=resumed["step"] if resumed["checkpoint"] else None)
    record_restart(settled, attempt)
    return settled


def record_restart(restart: Restart, attempt: AttemptDir) -> None:
    write_atomically(attempt.restart, json.dumps(restart.facts(), indent=1))


def record_verdict(attempt: AttemptDir, lines: Sequence[str]) -> None:
    with contextlib.suppress(OSError):  # a full disk: the screen has it
        write_atomically(attempt.verdict, "".join(f"{line}\n" for line in lines[:1]))


def last_plan(run: RunDir) -> dict[str, Any]:
    """plan.json of the newest training attempt on this node 0; empty if there is none."""
    number = _highest(run.path / "attempts", r"(\d+)")
    return read_json(run.attempt(f"{number:03d}").plan)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where the file is missing or junk."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _numbered(name: str, digits: int = 1) -> str:
    return rf"{re.escape(name)}-(\d{{{digits},}})"


def _highest(folder: Path, pattern: str) -> int:
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else iter(())
    return max((int(match[1]) for name in names if (match := re.fullmatch(pattern, name))), default=0)
