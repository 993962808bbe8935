"""`runs`: one line a run, from what lies in its folder; junk in there never stops the table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.contract import Outcome
from configs.run_dir import RUN_NAME, AttemptDir, RunDir
from launch.run_folder import is_running, newest_step, read_json
from launch.supervise import load_outcome

COLUMNS = ("run", "status", "step", "top-1", "wall time", "how it ended")


def render_runs(runs: Path) -> str:
    """The table, oldest run first."""
    paths = [path for path in runs.iterdir() if RUN_NAME.fullmatch(path.name)] if runs.is_dir() else []
    folders = [RunDir(path) for path in paths if path.is_dir()]
    if not folders:
        return f"no runs in {runs}"
    rows = [_row_or_junk(run) for run in sorted(folders, key=lambda run: (run.path.stat().st_mtime, run.name))]
    table = [COLUMNS, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    cells = [[f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)] for row in table]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def describe_result(result: Mapping[str, Any]) -> str:
    """`step 1175, top-1 99.45 %, 91.2 s`, as far as the result says."""
    parts = (("step ", _step(result)), ("top-1 ", _top1(result)), ("", _wall_time(result)))
    return ", ".join(f"{label}{text}" for label, text in parts if text) or "no result was recorded"


def _row_or_junk(run: RunDir) -> tuple[str, ...]:
    try:
        return _row(run)
    except Exception:  # whatever lies there, the other runs are to be seen
        return run.name, "unreadable", "", "", "", ""


def _row(run: RunDir) -> tuple[str, ...]:
    result = read_json(run.result)
    newest = newest_step(run)
    step = _step(result) or ("" if newest is None else str(newest))
    status, attempt = _status(run, result), _last_attempt(run)
    said = attempt.verdict if attempt and status in ("failed", "killed") else None
    why = said.read_text(encoding="utf-8", errors="replace").strip() if said and said.is_file() else ""
    return run.name, status, step, _top1(result), _wall_time(result), why.removeprefix("FAILED: ")


def _status(run: RunDir, result: Mapping[str, Any]) -> str:
    if is_running(run):
        return "running"
    if isinstance(result.get("status"), str):
        return str(result["status"])
    attempt = _last_attempt(run)
    if attempt is None:
        return "not started"
    statuses = {outcome.status for outcome in _outcomes(attempt)}
    return next((status for status in ("failed", "stopped", "done") if status in statuses), "killed")


def _last_attempt(run: RunDir) -> AttemptDir | None:
    attempts = run.path / "attempts"
    labels = sorted(path.name for path in attempts.iterdir() if path.name[:3].isdigit()) if attempts.is_dir() else []
    return run.attempt(labels[-1]) if labels else None


def _outcomes(attempt: AttemptDir) -> list[Outcome]:
    found = []
    for path in attempt.path.glob("outcome-rank*.json"):
        try:
            outcome = load_outcome(attempt, int(path.stem.removeprefix("outcome-rank")))
        except (ValueError, TypeError, OSError):
            continue
        found += [outcome] if outcome else []
    return found


def _find(result: Mapping[str, Any], *names: str) -> float | None:
    """The first of these that is a number, in the result itself or in its metrics."""
    metrics = result.get("metrics")
    for place in (result, metrics if isinstance(metrics, dict) else {}):
        for name in names:
            if isinstance(place.get(name), int | float):
                return float(place[name])
    return None


def _step(result: Mapping[str, Any]) -> str:
    step = _find(result, "step", "steps")
    return "" if step is None else f"{step:.0f}"


def _top1(result: Mapping[str, Any]) -> str:
    top1 = _find(result, "eval/top1", "top1")
    return "" if top1 is None else f"{100 * top1:.2f} %"


def _wall_time(result: Mapping[str, Any]) -> str:
    seconds = _find(result, "wall_s")
    return "" if seconds is None else f"{seconds:.1f} s"
