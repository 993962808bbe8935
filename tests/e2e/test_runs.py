"""Runs that finish: what they print, what they leave in their folder, and what goes on from there."""

import contextlib
import json
import os
import pty
import re
import select
import socket
import termios
from collections.abc import Iterator

import pytest

from configs.loader import load_config
from tests.e2e.commands import ROOT, Command, Place, is_loopback, listening_on, needs_proc

pytestmark = needs_proc

STRAY = {
    "RANK": "5",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "7",
    "MASTER_ADDR": "no-such-host.invalid",
    "MASTER_PORT": "1",
    "PET_NNODES": "3",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
}


def result_of(here: Place, name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(here.run_dir(name).result.read_text())
    return found


# --- one process ------------------------------------------------------------------------------------------------------


def test_one_process_leaves_a_run_folder(trained: Place) -> None:
    (command, *_) = trained.commands
    run = trained.run_dir("done")
    names = {path.name for path in run.path.iterdir()}
    (events,) = (name for name in names if name.startswith("events.out.tfevents."))
    expected = {
        "config.yaml",
        "attempts",
        "checkpoints",
        "metrics.jsonl",
        "result.json",
        "model.safetensors",
        "classes.json",
        "evaluation.json",
        "confusion.csv",
        ".lock",
    }
    assert names == expected | {events}
    assert {path.name for path in run.checkpoints.iterdir()} == {"step_00000008", "step_00000016", "best.json"}
    assert command.lines[0].startswith("1 CPU process: ")
    assert command.lines[1] == "run done in runs/done, attempt 001"
    assert command.lines[-1].startswith(f"done: {run.path}")
    assert (result_of(trained, "done")["status"], result_of(trained, "done")["world_size"]) == ("finished", 1)
    assert trained.attempt("done").rank_log(0).read_text().splitlines() == command.lines[2:]
    assert list(trained.temporary.iterdir()) == []


def test_nothing_heavy_is_imported_to_count_flops(trained: Place) -> None:
    """Without torchvision and DDP the first count would take a second or two of imports."""
    assert result_of(trained, "done")["arithmetic"] is None
    assert "perf/tflops" not in trained.run_dir("done").metrics.read_text()


def test_whether_to_compile_is_measured_once_a_run(here: Place) -> None:
    said = "compile: auto: measuring a step with and without torch.compile"
    first = here.run("train", "tiny.yaml", "--run-name", "x", "compile=auto", "max_epochs=1")
    assert first.output.count(said) == 1
    # 8 updates, whatever a step takes.
    (line,) = (line for line in first.lines if line.startswith("compile "))
    assert re.fullmatch(r"compile    off \(auto: 8 steps of [\d.]+ ms are too few to pay for compiling\)", line)
    again = here.run("resume", "x", "max_epochs=2", "--allow-changes")
    assert said not in again.output
    assert line in again.lines
    assert list(here.temporary.iterdir()) == []


def test_eval_and_runs_agree_with_the_run(finished: Place) -> None:
    evaluated = finished.run("eval", "done", "--checkpoint", "last")
    pattern = r"evaluated 203/203: top-1 (\d+\.\d\d %)  loss \d\.\d{4}"
    (training,) = finished.run_dir("done").path.glob("attempts/001/logs/rank0.log")
    at_the_end = list(re.finditer(pattern, training.read_text()))[-1]
    assert at_the_end[0] in evaluated.lines
    answer = json.loads((finished.attempt("done", "eval-001").path / "eval.json").read_text())
    metrics = result_of(finished, "done")["metrics"]
    assert answer.pop("data") == "tests.dist.toys:images"
    assert answer == {"checkpoint": "step_00000016", "metrics": {name: metrics[name] for name in answer["metrics"]}}
    assert re.search(rf"^done +finished +16 +{at_the_end[1]} +[\d.]+ s$", finished.run("runs").output, re.MULTILINE)


def test_a_run_that_goes_on_is_evaluated_without_being_disturbed(here: Place) -> None:
    net = ("model={name: tests.e2e.toys:Held, args: {}}",)
    training = here.start("train", "tiny.yaml", *net, "--run-name", "x", HOLD_AT="11")  # after the first checkpoint
    training.until(here.held(1), "the rank waits")
    evaluated = here.run("eval", "x", "--checkpoint", "8", HOLD_AT="-1")
    assert evaluated.lines[-1] == f"written to {here.attempt('x', 'eval-001').path}"
    run = here.run_dir("x")
    assert not (run.path / "evaluation.json").exists()
    assert not run.result.exists()
    (here.hold / "go").touch()
    training.ends_with(0)
    content = json.loads((run.path / "evaluation.json").read_text())
    assert (content["checkpoint"], content["samples"]) == ("step_00000016", 203)
    assert [path.name for path in sorted((run.path / "attempts").iterdir())] == ["001", "eval-001"]


def test_a_finished_run_says_so_and_refuses_other_settings(finished: Place) -> None:
    before = _tree(finished)
    resumed = finished.run("resume", "done")
    assert resumed.lines[0].startswith("run done is finished: step 16, top-1 ")
    assert resumed.lines[1] == "to extend it: python -m launch resume done max_epochs=4 --allow-changes"
    refused = finished.run("train", "tiny.yaml", "--run-name", "done", "optim.lr=0.2", "seed=1", code=2)
    assert "  optim.lr: 0.01 -> 0.2" in refused.lines
    assert "  seed: 0 -> 1" in refused.lines
    assert "--allow-changes" in refused.lines[-1]
    assert _tree(finished) == before


def test_a_run_is_extended_or_started_afresh_beside_it(finished: Place) -> None:
    before = finished.run_dir("done").weights.read_bytes()
    longer = finished.start("resume", "done", "max_epochs=3", "optim.lr=0.2", "--allow-changes")
    fresh = finished.start("train", "tiny.yaml", "--run-name", "done", "--fresh")
    longer.ends_with(0)
    fresh.ends_with(0)
    assert any(line.startswith("resume     step_00000016: epoch 2, step 16") for line in longer.lines)
    assert result_of(finished, "done")["step"] == 24
    changed = load_config(finished.run_dir("done").config).config
    assert (changed.max_epochs, changed.optim.lr) == (3, 0.2)
    assert finished.run("resume", "done").lines[0].startswith("run done is finished: step 24, ")
    assert "run done-2 in runs/done-2, attempt 001" in fresh.lines
    assert finished.run_dir("done-2").weights.read_bytes() == before  # the same experiment again


def test_changes_that_do_not_fit_leave_the_run_as_it_was(finished: Place) -> None:
    """--allow-changes lets them through; that it is another network, only the ranks can tell."""
    run = finished.run_dir("done")
    before = run.config.read_bytes(), run.result.read_bytes()
    refused = finished.run("resume", "done", "model.args={hidden: [512]}", "--allow-changes", code=2)
    assert "Traceback" not in refused.output
    assert re.search(r"^checkpoint error: .* is of another architecture: ", refused.last_lines, re.MULTILINE)
    assert (run.config.read_bytes(), run.result.read_bytes()) == before
    assert finished.run("resume", "done").lines[0].startswith("run done is finished: step 16, ")


def test_accelerate_runs_one_process_in_the_precision_asked_for(here: Place) -> None:
    """Neither the user's own Accelerate config nor what another launcher has left in the environment decides."""
    config = here.folder / "hf" / "accelerate" / "default_config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("compute_environment: LOCAL_MACHINE\nnum_processes: 3\nmixed_precision: bf16\nuse_cpu: false\n")
    options = ("--launcher", "accelerate", "--nproc", "1", "mixed_precision=fp16", "--run-name", "x")
    command = here.run("train", "tiny.yaml", *options, HF_HOME=str(config.parents[1]), **STRAY)
    assert json.loads(here.attempt("x").plan.read_text())["launcher"] == "accelerate"
    result = result_of(here, "x")
    assert (result["precision"], result["world_size"], result["step"]) == ("fp16", 1, 16)
    assert [line for line in command.lines if "warning" in line.lower()] == [
        "warning: fp16 on a CPU is for testing: convolutions are some hundred times slower; "
        "use mixed_precision: bf16 or no"
    ]


@pytest.mark.parametrize("how", ["Ctrl-C", "hang-up"])
def test_a_terminal_shows_a_bar_and_the_log_does_not(here: Place, how: str) -> None:
    """Until a Ctrl-C is typed there, or the terminal goes away, as at the end of an SSH connection."""
    screen, terminal = pty.openpty()
    shown = bytearray()
    with os.fdopen(screen, "r+b", buffering=0) as user:
        with os.fdopen(terminal, "wb", buffering=0):
            termios.tcsetwinsize(terminal, (24, 80))
            endless = ("max_epochs=null", "max_steps=1000000", "log.console_every_s=0")
            command = here.start("train", "tiny.yaml", *endless, "--run-name", "x", terminal=terminal)
        command.until(lambda: b"train/loss" in _read(screen, shown), "a bar with a loss")
        if how == "Ctrl-C":
            user.write(b"\x03")
            last_line = b"\r\x1b[Kstopped by SIGINT at step"  # whatever was left of the bar is cleared
            command.until(lambda: last_line in _read(screen, shown), "the last line")
            command.ends_with(130)
    command.ends_with(130 if how == "Ctrl-C" else 75)
    assert re.search(rb"\r.*\d+/1000000 \[.*step/s, train/loss \d", bytes(shown))
    log = here.attempt("x").rank_log(0).read_bytes()
    assert b"\r" not in log
    assert b"\x1b" not in log
    assert not re.search(rb"^step \d+/1000000  epoch", log, re.MULTILINE)  # what the bar shows is not said again
    assert re.fullmatch(rb"saved step_\d+", log.splitlines()[-1])


def _read(screen: int, shown: bytearray) -> bytes:
    """Everything shown so far; whoever prints waits for us to read."""
    while select.select([screen], [], [], 0)[0]:
        shown += os.read(screen, 65536)
    return bytes(shown)


# --- several ----------------------------------------------------------------------------------------------------------


def test_smoke_config_trains_on_two_ranks_from_packed_mnist(here: Place) -> None:
    """What `make smoke` does, with its own checks of loss and accuracy."""
    command = here.run("train", str(ROOT / "configs" / "smoke.yaml"), "--nproc", "2", CUDA_VISIBLE_DEVICES="")
    assert command.lines[0].startswith("2 CPU processes over gloo: ")
    assert "evaluated 10000/10000" in command.output
    assert result_of(here, "smoke-001")["world_size"] == 2
    assert (here.folder / "data" / "MNIST").is_dir()


def test_two_ranks_print_a_short_plain_log_and_listen_on_loopback_only(here: Place) -> None:
    settings = ("model.name=tests.e2e.toys:Held", "model.args={}", "max_epochs=5")
    environment = {"TRAIN_SIZE": "320", "HOLD_AT": "3"}
    command = here.start("train", "tiny.yaml", *settings, "--run-name", "x", "--nproc", "2", **environment)
    command.until(here.held(2), "two ranks in their fourth step")
    listening = listening_on(here.living())
    (here.hold / "go").touch()
    command.ends_with(0)
    assert len(listening) >= 2  # each rank's gloo
    assert [address for address in listening if not is_loopback(address)] == []
    assert result_of(here, "x")["step"] == 200
    assert len(command.lines) < 200
    assert [line for line in command.lines if command.lines.count(line) > 1] == []
    assert sum(line.startswith("optimizer ") for line in command.lines) == 1
    for text in ("\r", "\x1b", "OMP_NUM_THREADS", "destroy_process_group", "warning", "hello from rank 1"):
        assert text not in command.output, text
    logs = [here.attempt("x").rank_log(rank).read_text() for rank in (0, 1)]
    assert "hello from rank 0" in logs[0].splitlines()
    assert logs[1].splitlines() == ["hello from rank 1"]
    assert len(list(here.folder.rglob("events.out.tfevents.*"))) == 1
    assert list(here.temporary.iterdir()) == []


def test_two_runs_at_once_with_usual_ports_taken_and_stray_variables(here: Place) -> None:
    with _taken(29400), _taken(29500):
        commands = [here.start("train", "tiny.yaml", "--nproc", "2", **STRAY) for _ in range(2)]
        for command in commands:
            command.ends_with(0)
    results = [result_of(here, name) for name in ("tiny-001", "tiny-002")]
    assert [(result["world_size"], result["step"], result["precision"]) for result in results] == [(2, 16, "no")] * 2
    assert here.run_dir("tiny-001").weights.read_bytes() == here.run_dir("tiny-002").weights.read_bytes()


@contextlib.contextmanager
def _taken(port: int) -> Iterator[None]:
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # then someone else has it, which is as good
            taken.bind(("", port))
            taken.listen()
        yield


def test_two_nodes_train_one_run(here: Place) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = ("--nnodes", "2", "--rdzv-endpoint", endpoint, "--run-name", "both")
    nodes = [here.start("train", "tiny.yaml", *options, "--node-rank", str(rank)) for rank in range(2)]
    for node in nodes:
        node.ends_with(0)
    assert sum(_says_done(node) for node in nodes) == 1  # rank 0's console
    result = result_of(here, "both")
    assert (result["world_size"], result["step"]) == (2, 16)
    assert len(list(here.run_dir("both").path.glob("events.out.tfevents.*"))) == 1
    assert here.living() == []


def _says_done(command: Command) -> bool:
    return command.lines[-1].startswith("done: ")


def _tree(here: Place) -> dict[str, int]:
    """When each file of the runs was last written. The lock holds the pid of the last command."""
    files = (path for path in (here.folder / "runs").rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path): path.stat().st_mtime_ns for path in files}
