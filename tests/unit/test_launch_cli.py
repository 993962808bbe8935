"""The command line: what it refuses, in words, and what it costs."""

import errno
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.contract import WorkerPlan
from configs.errors import ConfigError, EnvironmentProblem, LockstepError
from configs.known_data import KNOWN_DATA
from configs.run_dir import RunDir
from configs.schema import RunConfig
from launch import cli, preflight, signals
from launch.backends import Rendezvous
from launch.plan import LaunchPlan
from tests.folders import make

ROOT = Path(__file__).parent.parent.parent
CONFIG = "max_epochs: 2\nglobal_batch_size: 64\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCKSTEP_RUNS", raising=False)
    (tmp_path / "demo.yaml").write_text(CONFIG)
    return tmp_path


def refused(*arguments: str) -> LockstepError:
    with pytest.raises(LockstepError) as caught:
        cli.app(list(arguments), standalone_mode=False)
    return caught.value


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.app(["plan", *arguments], standalone_mode=False) in (0, None)
    return capsys.readouterr().out


def test_the_launcher_never_imports_torch_nor_the_trainer() -> None:
    code = (
        "import sys, launch.cli, launch.start, launch.attempts, launch.report, launch.supervise\n"
        "import launch.render, launch.probe, launch.runs_table\n"
        "sys.exit(' '.join({'torch', 'accelerate', 'trainer', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("nproc", ["0", "-1", "abc", "", "1.5", "²"])
def test_a_strange_number_of_processes_is_one_clear_line(here: Path, nproc: str) -> None:
    error = refused("train", "demo.yaml", f"--nproc={nproc}")
    assert error.exit_code == 2
    assert str(error) == f"--nproc (NGPU) is a number of processes: expected a whole number >= 1 or auto, got {nproc!r}"


def test_all_that_is_wrong_is_told_at_once_and_nothing_is_made(here: Path) -> None:
    error = refused(
        "train", "demo.yaml", "optim.lrr=1", "max_epochs=-2", "--nproc", "x", "--run-name", "a/b", "--node-rank", "3"
    )
    text = str(error)
    for part in ("optim.lrr", "max_epochs", "--nproc", "'a/b'", "--node-rank 3"):
        assert part in text
    assert sorted(path.name for path in here.iterdir()) == ["demo.yaml"]


def test_plan_shows_origins_and_makes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, "demo.yaml", "optim.lr=0.5", "--nproc", "2", "device=cpu")
    assert re.search(r"^run +runs/demo-001 \(new\)$", text, re.MULTILINE)
    assert re.search(r"optim.lr +0.5 +command line", text)
    assert re.search(r"max_epochs +2 +demo.yaml:1", text)
    assert re.search(r"seed +0 +default", text)
    assert "938 per epoch x 2 epochs = 1876" in text
    assert sorted(path.name for path in here.iterdir()) == ["demo.yaml"]


def test_dry_run_is_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, "demo.yaml")
    cli.app(["train", "demo.yaml", "--dry-run"], standalone_mode=False)
    assert capsys.readouterr().out == text


def test_values_with_spaces_survive(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "'a folder/data'" in planned(capsys, "demo.yaml", "data.root=a folder/data").replace('"', "'")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["resume", "nothing"], "there is no run 'nothing'"),
        (["eval", "nothing"], "there is no run 'nothing'"),
        (
            ["eval", "started", "--checkpoint", "foo"],
            "--checkpoint: expected best, last or the number of a step, got 'foo'",
        ),
        (["eval", "started", "--checkpoint=-1"], "got '-1'"),
        (["eval", "started"], "run 'started' has no checkpoint yet"),
        (["train", "missing.yaml"], "missing.yaml"),
        (["train", "demo.yaml", "--nnodes", "2"], "--rdzv-endpoint HOST:PORT"),
    ],
)
def test_refusals(here: Path, command: list[str], text: str) -> None:
    run = here / "runs" / "started"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    (run / "model.safetensors").write_text("")  # is not evaluated: it holds no EMA and no statistics of a rank
    error = refused(*command)
    assert error.exit_code == 2
    assert text in str(error)
    assert not (run / "attempts").exists()


def test_problems_are_printed_one_a_line_without_a_traceback(here: Path) -> None:
    command = [sys.executable, "-m", "launch", "train", "demo.yaml", "optim.lrr=1", "--nproc", "0"]
    environ = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line[:14] for line in done.stderr.splitlines()] == ["config error: "] * 2


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a/plan.json"),
            "runs/a/plan.json: No space left on device",
        ),
        (OSError("strange"), "strange"),
    ],
)
def test_an_error_of_the_launchers_own_files_is_one_line(
    error: OSError, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(signals, "raise_on_stop", lambda: None)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 3
    assert capsys.readouterr().err == f"environment error: {line}\n"


def test_a_killed_helper_is_one_line(here: Path) -> None:
    run = RunDir(here / "runs/x")
    worker = WorkerPlan("train", RunConfig(max_epochs=1, global_batch_size=8), "direct", "cpu", 1, 1, 1)
    plan = LaunchPlan(worker, "", "", 1, 0, [sys.executable], {}, [], {}, run.attempt("001"), here, [])
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)", "plan.json"]
    with pytest.raises(EnvironmentProblem, match=r"the helper .* was killed by SIGKILL \(out of memory\?\)$"):
        preflight.run_helper(command, plan, {}, capture=True)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(EnvironmentProblem, match=r"no-such-host\.invalid"):
        preflight.check_rendezvous(Rendezvous(2, 1, "no-such-host.invalid:29400", None))


def test_a_busy_port_is_named_with_its_owner() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=rf"port {port} .*in use"):
            preflight.check_rendezvous(Rendezvous(2, 0, f"127.0.0.1:{port}", None))
        preflight.check_rendezvous(Rendezvous(2, 1, f"127.0.0.1:{port}", None))
    assert preflight.local_address(f"127.0.0.1:{port}") == "127.0.0.1"


def test_data_is_missing_until_all_its_files_are_there(tmp_path: Path) -> None:
    config = RunConfig(max_epochs=1, global_batch_size=8)
    folder = tmp_path / "data/MNIST/raw"
    folder.mkdir(parents=True)
    for name in KNOWN_DATA["mnist"].files:
        assert preflight.data_missing(config, tmp_path)
        (folder / name).write_text("")
    assert not preflight.data_missing(config, tmp_path)
    own = RunConfig.model_validate(
        {"max_epochs": 1, "global_batch_size": 8, "data": {"name": "mine:data", "num_classes": 2}}
    )
    assert not preflight.data_missing(own, tmp_path)


def test_a_full_or_closed_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.check_disk(tmp_path / "not/yet")
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        preflight.check_disk(tmp_path / "file" / "runs")
    monkeypatch.setattr(preflight, "MIN_FREE_BYTES", 2**70)
    with pytest.raises(EnvironmentProblem, match="MiB free"):
        preflight.check_disk(tmp_path)


def test_a_folder_of_images_is_looked_for_before_anything_starts(tmp_path: Path) -> None:
    def settings(**data: Any) -> RunConfig:
        return RunConfig.model_validate({"max_epochs": 1, "global_batch_size": 8, "data": data})

    folder = settings(name="imagefolder", root="images")
    with pytest.raises(ConfigError, match=rf"data.root: there is no folder {tmp_path}/images"):
        preflight.check_folders(folder, tmp_path)
    preflight.check_folders(settings(root="images"), tmp_path)
    make(tmp_path / "images", train__a=1, val__a=1)
    preflight.check_folders(folder, tmp_path)
