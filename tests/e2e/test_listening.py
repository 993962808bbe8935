"""On one node nothing that we start listens beyond loopback, looked at while it runs."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from configs.run_dir import RunDir
from configs.schema import RunConfig
from launch.plan import plan_launch
from launch.request import Request
from launch.topology import Topology
from tests.e2e.commands import ROOT, Place, is_loopback, listening_on, needs_proc, until

pytestmark = needs_proc

# Runs in the place of a rank: says that it is there and waits.
HELLO = """
import os, time
from pathlib import Path
folder = Path(os.environ["HOLD"])
(folder / f"held-{os.environ['RANK']}").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
"""


def test_two_ranks_with_loader_workers(here: Place) -> None:
    held = ("model.name=tests.e2e.toys:Held", "model.args={}", "data.residency=stream", "data.num_workers=2")
    command = here.start("train", "tiny.yaml", *held, "--run-name", "x", "--nproc", "2", HOLD_AT="9")
    command.until(here.held(2), "two ranks in their second epoch")  # an evaluation and a save are behind them
    listening = listening_on(here.living())
    (here.hold / "go").touch()
    command.ends_with(0)
    assert len(listening) >= 2  # each rank's gloo
    assert [address for address in listening if not is_loopback(address)] == []


def test_accelerate_launch_of_several_processes(here: Place) -> None:
    """As planned for two GPUs; here the ranks need none."""
    (here.folder / "hello.py").write_text(HELLO)
    gpus = Topology(cores=8, num_gpus=2, gpu_reason=None, has_amx=False, shm_bytes=None)
    meeting = here.folder / "meeting"
    meeting.mkdir()
    request = Request("x", RunDir(here.folder / "x").attempt("001"), meeting, sys.executable, ROOT, here.folder)
    request = dataclasses.replace(request, nproc=2, launcher="accelerate", worker="hello")
    plan = plan_launch(RunConfig.model_validate({"max_epochs": 1, "global_batch_size": 8}), gpus, request)
    plan.attempt.path.mkdir(parents=True)
    for name, text in plan.files.items():
        (plan.attempt.path / name).write_text(text)
    console = here.folder / "console"
    with console.open("wb") as output:
        process = subprocess.Popen(
            plan.argv,
            cwd=here.folder,
            env=plan.child_environ(here.environment()),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    until(lambda: here.held(2)() or process.poll() is not None, "two ranks")
    listening = listening_on(here.living())
    (here.hold / "go").touch()
    assert process.wait(60) == 0, console.read_text()
    assert listening == []


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_tensorboard(here: Place) -> None:
    make = ["make", "--no-print-directory", "tensorboard", "VENV=none", f"PYTHON={sys.executable}", "ARGS=--port 0"]
    with (here.folder / "console").open("wb") as output:
        process = subprocess.Popen(
            make, cwd=ROOT, env=here.environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until(lambda: listening_on(here.living()) or process.poll() is not None, "the server")
        listening = listening_on(here.living())
    finally:
        here.kill_all()  # its data server is in a group of its own
        process.wait()
    assert listening, Path(here.folder / "console").read_text()
    assert [address for address in listening if not is_loopback(address)] == []
