"""What is refused before anything starts, and what only plans: one clear line each, no folder, no process."""

import re
import subprocess
import sys

import pytest

from tests.e2e.commands import Place, needs_proc

pytestmark = needs_proc


def refused(here: Place, code: int, *arguments: str) -> list[str]:
    """The lines of a command that must start nothing."""
    command = here.run("train", "tiny.yaml", *arguments, code=code)
    assert "Traceback" not in command.output
    assert not (here.folder / "runs").exists()
    return command.lines


@pytest.mark.parametrize("nproc", ["0", "-1", "abc", ""])
def test_a_strange_number_of_processes_is_one_line(here: Place, nproc: str) -> None:
    (line,) = refused(here, 2, "--nproc", nproc)
    assert line.startswith("config error: --nproc (NGPU) ")
    assert line.endswith(f"got {nproc!r}")


def test_what_the_machine_cannot_do_is_one_line(here: Place) -> None:
    (line,) = refused(here, 3, "device=cuda")
    assert re.fullmatch(r"environment error: device=cuda, but torch sees no GPU: \S.*; use device=auto or .*", line)
    (line,) = refused(here, 2, "global_batch_size=1", "--nproc", "2")
    assert "global_batch_size=1 is smaller than the number of processes, 2;" in line
    (line,) = refused(here, 2, "--launcher", "accelerate", "--nproc", "2")
    assert "Accelerate 1.15 starts one process" in line


def test_too_few_open_files_for_loader_workers_are_told_with_numbers(here: Place) -> None:
    limited = ("sh", "-c", 'ulimit -n 100; exec "$@"', "sh")
    command = here.run("train", "tiny.yaml", "data.residency=stream", "--nproc", "2", wrapped_in=limited, code=3)
    # 64, 8 a rank, 20 a worker.
    said = (
        "a process may have 100 open files and a rank with 2 loader workers needs up to 120; raise it with `ulimit -n"
    )
    assert command.lines == [f"environment error: {said} 120` or use fewer data.num_workers"]
    assert not (here.folder / "runs").exists()


def test_all_that_is_wrong_in_a_config_is_told_at_once(here: Place) -> None:
    (here.folder / "tiny.yaml").write_text("max_epochs: 2\nglobal_batch_size: 8\noptim:\n  lr: fast\n  momentun: 0.9\n")
    lines = refused(here, 2, "data.num_classes=-3", "mixed_precision=fp17", "--nproc", "many")
    assert [line.startswith("config error: ") for line in lines] == [True] * 5
    typo = "tiny.yaml:5: unknown key 'optim.momentun'; did you mean 'optim.momentum'?"
    for part in ("tiny.yaml:4: optim.lr: 'fast'", typo, "data.num_classes=-3", "fp17", "'many'"):
        assert sum(part in line for line in lines) == 1, part


def test_plan_makes_no_folder_and_imports_no_torch(here: Place) -> None:
    plan = here.run("plan", "tiny.yaml", "--nproc", "2", python=("-X", "importtime"))
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", plan.output, re.MULTILINE))
    assert "launch.plan" in imported
    assert not imported & {"torch", "accelerate", "trainer", "numpy"}
    assert re.search(r"^run +runs/tiny-001 \(new\)$", plan.output, re.MULTILINE)
    assert not (here.folder / "runs").exists()


def test_plan_with_a_probe_knows_the_network(here: Place) -> None:
    plan = here.run("plan", "tiny.yaml", "virtual_shards=2", "--probe")
    assert re.search(r"^parameters +70,660$", plan.output, re.MULTILINE)
    # 64 -> 1024 -> 4: forward, the gradients of the weights, and that of what is between the layers.
    assert re.search(r"^FLOPs +286,720 per sample, 139,264 of them forward; .* TFLOP/s", plan.output, re.MULTILINE)
    assert re.search(r"^bits +2 virtual shards \(command line\) of \d+ samples: ", plan.output, re.MULTILINE)
    assert re.search(
        r"^bits cost +a step of one process's share takes [\d.]+ ms in its shards", plan.output, re.MULTILINE
    )
    assert "8 per epoch x 2 epochs = 16" in plan.output
    assert not (here.folder / "runs").exists()
    assert list(here.temporary.iterdir()) == []


def test_a_probe_says_once_what_it_cannot_do(here: Place) -> None:
    net = ("model.name=tests.dist.odd_nets:Writes", "model.args={}")
    (line,) = here.run("plan", "tiny.yaml", "virtual_shards=2", *net, "--probe", code=2).lines
    assert line.startswith(
        "config error: virtual_shards: put_ (layer put) has no deterministic kernel on cpu, and equal"
    )
    assert line.endswith("; use another layer or virtual_shards: 0")


def test_closed_streams_and_a_narrow_encoding_stop_nothing(here: Place) -> None:
    command = [sys.executable, "-m", "launch", "plan", "tiny.yaml"]
    environment = here.environment() | {"PYTHONIOENCODING": "ascii"}
    script = 'exec "$@" <&- >&- 2>&-'
    closed = subprocess.run(["sh", "-c", script, "sh", *command], cwd=here.folder, env=environment, timeout=120)
    assert closed.returncode == 0
