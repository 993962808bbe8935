"""Runs of `python -m launch` as a user would start them, and what they left behind."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.derive import counted
from configs.errors import EXIT_DONE, TrainingError
from configs.run_dir import RunDir, step_name
from launch.follow import say, shown
from launch.options import ROOT
from launch.run_folder import newest_step, read_json

RECORDED = "log.sample_ids=true"


@dataclass
class Place:
    """Where the runs of one proof are made: their folder and the command's own settings."""

    folder: Path
    config: Path
    settings: Sequence[str]
    """Overrides of the user's and the proof's own, for all runs."""
    has_own_interval: bool = False
    """Whether they say how often to save."""
    keep: bool = False
    """Whether the folder stays."""

    def run(self, name: str) -> RunDir:
        return RunDir(self.folder / name)

    def reference(self, nproc: int) -> "Ended":
        """The run that nothing happens to. Raises TrainingError if it fails by itself."""
        ended = self.train("whole", nproc=nproc)
        if ended.code != EXIT_DONE or ended.checkpoint is None:
            raise TrainingError(f"the run fails by itself, exit code {ended.code}: {ended.last_line}; see {ended.log}")
        say(f"the uninterrupted run: {ended.checkpoint.name} on {counted(nproc, 'process')}")
        return ended

    def frequent_checkpoints(self, steps: int) -> list[str]:
        """Eight in a run, unless the configuration says how many: with none there is nothing to come back to."""
        return [] if self.has_own_interval else [f"checkpoint.every_steps={max(1, steps // 8)}"]

    def train(self, name: str, *arguments: str, nproc: int = 1) -> "Ended":
        """`launch train`; a run that is there already goes on."""
        # What is given twice would be refused; the proof's own settings come last, and hold.
        settings = {text.partition("=")[0]: text for text in (*self.settings, RECORDED, *arguments)}
        command = ["train", str(self.config), *settings.values()]
        return self._launch(name, [*command, "--run-name", name, "--nproc", str(nproc), "--allow-changes"])

    def _launch(self, name: str, arguments: list[str]) -> "Ended":
        log = self.folder / f"{name}.log"
        # The project's own folder comes first: `python -m launch` must be this one, wherever the user is.
        environ = dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "launch", *arguments, "--runs-dir", str(self.folder)]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environ
            )
            try:
                code = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
        return Ended(self.run(name), code, log)


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    run: RunDir
    code: int
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def last_line(self) -> str:
        lines = [line for line in self.output.splitlines() if line.strip()]
        failed = [line for line in lines if line.startswith(("FAILED", "config error", "environment error"))]
        return (failed or lines or ["no output"])[-1]

    def unlike(self, code: int) -> list[str]:
        """The problem, if it ended with another exit code."""
        return [] if self.code == code else [f"exit code {self.code}, expected {code}: {self.last_line}"]

    def lost(self) -> list[str]:
        """The problem, if a checkpoint was announced as saved and is neither there nor followed by a newer one."""
        announced = max((int(step) for step in re.findall(r"^saved step_(\d+)", self.output, re.MULTILINE)), default=-1)
        found = -1 if self.checkpoint is None else int(self.checkpoint.name.removeprefix("step_"))
        return [f"{step_name(announced)} was announced as saved and is gone"] if found < announced else []

    @property
    def checkpoint(self) -> Path | None:
        """The newest one."""
        newest = newest_step(self.run)
        return None if newest is None else self.run.checkpoints / step_name(newest)

    def state(self) -> dict[str, Any]:
        """state.json of the newest checkpoint."""
        return {} if self.checkpoint is None else read_json(self.checkpoint / "state.json")

    def metrics(self) -> list[dict[str, Any]]:
        """metrics.jsonl without what was measured with a clock."""
        lines = self.run.metrics.read_text(encoding="utf-8").splitlines() if self.run.metrics.exists() else []
        return [{k: v for k, v in json.loads(line).items() if not k.startswith("perf/")} for line in lines]

    def samples(self) -> tuple[dict[int, list[int]], list[int]]:
        """Sample indices of each global batch, over all ranks, as of the last attempt that trained on it; and the
        batches for which a replay had other ones than the attempt before."""
        found: dict[int, list[int]] = {}
        differing: list[int] = []
        unsure: set[int] = set()
        for attempt in sorted((self.run.path / "attempts").glob("[0-9]*")):
            batches: dict[int, list[int]] = {}
            for rank in range(len(list(attempt.glob("samples-rank*.jsonl")))):
                # Of a batch that was trained on twice, before and after a rollback, the last line counts.
                for batch, ids in dict(_lines(self.run.attempt(attempt.name).samples(rank))).items():
                    batches.setdefault(batch, []).extend(ids)
            unsure.add(max(batches, default=-1))  # a rank that was killed may lack its line
            differing += [batch for batch in batches.keys() & found.keys() - unsure if found[batch] != batches[batch]]
            found |= batches
        return found, differing


def _lines(path: Path) -> Iterator[tuple[int, list[int]]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            facts = json.loads(line)
        except ValueError:  # cut by a kill
            continue
        yield facts["batch"], facts["sample_ids"]


@contextmanager
def a_place(config: Path, runs: Path, settings: Sequence[str], *, has_own_interval: bool) -> Iterator[Place]:
    """A folder beside the runs for the proof's own; it stays if the proof fails, and the place is said."""
    runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="verify-", dir=runs)).resolve()
    place = Place(folder, config, settings, has_own_interval)
    try:
        yield place
    except BaseException:
        place.keep = True
        raise
    finally:
        if place.keep:
            say(f"the runs of this proof are kept in {shown(folder, Path.cwd())}", to_stderr=True)
        else:
            shutil.rmtree(folder)
