"""Kills a run at random moments, again and again, and checks that nothing is lost that was announced as saved.

    python -m benchmarks.soak --kills 200 --nproc 2

Each time a rank, the launcher, its agent or all of them at once are killed, some moments after the start, so also while
importing, saving or evaluating. In the end the newest checkpoint must have the bits of a run that nothing happened to.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from configs.beat import EVALUATION, SAVING, STARTING, read_beat
from configs.run_dir import RunDir
from launch.processes import find_process, is_alive
from launch.supervise import read_pids
from trainer import checkpoint

SETTINGS = [
    *("global_batch_size=64", "mixed_precision=no", "model.args={hidden: [512, 512]}"),
    *(
        "eval.every_steps=40",
        "eval.batch_size=2000",
        "checkpoint.every_steps=7",
        "log.every_steps=7",
        "expect.max_train_loss=null",
    ),
    *("expect.min_top1=null", "launch.num_threads=1"),
]
PHASES = {STARTING: "starting", EVALUATION: "evaluating", SAVING: "saving"}
LONGEST_S = 3.0
"""After which a run is killed at the latest, from its first beat."""


def main() -> int:
    options = _options()
    chance = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=options.runs_dir))
    run = RunDir(folder / "soak")
    where: collections.Counter[str] = collections.Counter()
    lost = skipped = 0
    for number in range(options.kills):
        target, phase = _start_and_kill(run, options.nproc, chance)
        where[f"{target} while {phase}"] += 1
        announced, (newest, damaged) = _announced(folder), _newest(run)
        lost += newest < announced
        skipped += damaged
        print(
            f"{number + 1}/{options.kills} {target} while {phase}: announced {announced}, newest valid {newest}",
            flush=True,
        )
    problems = [f"{lost} times something announced was lost"] if lost else []
    problems += _compare(folder, run, options.nproc)
    for what, count in sorted(where.items()):
        print(f"{count:4d} {what}")
    verdict = "; ".join(problems) or "bits equal"
    print(f"{options.kills} kills, {lost} losses, {skipped} incomplete folders seen; {verdict}")
    if not problems:
        shutil.rmtree(folder)
    return 1 if problems else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    options = parser.parse_args()
    options.runs_dir.mkdir(parents=True, exist_ok=True)
    return options


def _command(folder: Path, name: str, nproc: int, max_steps: int) -> list[str]:
    command = [sys.executable, "-m", "launch", "train", "configs/smoke.yaml", *SETTINGS, f"max_steps={max_steps}"]
    return [*command, "--run-name", name, "--runs-dir", str(folder), "--nproc", str(nproc)]


def _start_and_kill(run: RunDir, nproc: int, chance: random.Random) -> tuple[str, str]:
    """Returns whom it killed, and what rank 0 was doing."""
    attempts = len(list(run.path.glob("attempts/*")))
    with (run.path.parent / "console.txt").open("ab") as console:
        process = subprocess.Popen(
            _command(run.path.parent, run.name, nproc, 1_000_000), stdout=console, stderr=console
        )
    attempt = run.attempt(f"{attempts + 1:03d}")
    _until(lambda: len(read_pids(attempt)) == nproc or process.poll() is not None)
    if chance.random() < 0.8:  # else while it imports and builds
        _until(
            lambda: (
                ((beat := read_beat(attempt.beat(0))) is not None and beat.first_step >= 0)
                or process.poll() is not None
            )
        )
    time.sleep(chance.random() * LONGEST_S)
    beat = read_beat(attempt.beat(0))
    target = chance.choice(["a rank", "the launcher", "everything"])
    pids = [*read_pids(attempt).values()]
    victims = {"a rank": [chance.choice(pids)], "the launcher": [process.pid], "everything": [*pids, process.pid]}
    for pid in victims[target]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    left = [found for pid in pids if (found := find_process(pid)) is not None]
    _until(lambda: not any(is_alive(found) for found in left))
    return target, PHASES.get(beat.phase, "training") if beat else "starting"


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited two minutes"
        time.sleep(0.01)


def _announced(folder: Path) -> int:
    lines = (folder / "console.txt").read_text(errors="replace").splitlines()
    return max((int(line.split("step_")[1].split()[0]) for line in lines if line.startswith("saved step_")), default=-1)


def _newest(run: RunDir) -> tuple[int, int]:
    """Step of the newest valid checkpoint, -1 if there is none; and how many that look newer are damaged."""
    damaged: list[Path] = []
    newest = checkpoint.newest_valid(run.checkpoints, lambda path, _: damaged.append(path))
    return (-1 if newest is None else int(newest.name.removeprefix("step_"))), len(damaged)


def _compare(folder: Path, run: RunDir, nproc: int) -> list[str]:
    """Differences of the newest checkpoint from that of a run that was left in peace."""
    step, _ = _newest(run)
    command = _command(folder, "peace", nproc, step)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    ours, theirs = (RunDir(folder / name).checkpoints / f"step_{step:08d}" for name in (run.name, "peace"))
    hashes = [json.loads((path / checkpoint.MANIFEST).read_text()) for path in (ours, theirs)]
    names = [name for name in hashes[0].keys() | hashes[1].keys() if name.endswith(".safetensors")]
    return [f"{name} differs" for name in sorted(names) if hashes[0].get(name) != hashes[1].get(name)]


if __name__ == "__main__":
    sys.exit(main())
