"""Runs that go on by themselves after a failure, and failures after which they must not."""

import json
import re
import signal
from typing import Any

import pytest

from tests.e2e.commands import Command, Place, needs_proc

pytestmark = needs_proc

HELD = ("model.name=tests.e2e.toys:Held", "model.args={}", "optim.name=adam", "optim.momentum=0")
AT_ONCE = "launch.restart_wait_s=0"


def fault(kind: str, step: int, rank: int = 0, attempt: str = "1") -> str:
    return f"faults=[{{kind: {kind}, rank: {rank}, step: {step}, attempt: {attempt}}}]"


def attempts(here: Place, name: str) -> list[str]:
    return sorted(path.name for path in (here.run_dir(name).path / "attempts").iterdir())


def restart_of(here: Place, name: str, label: str = "002") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(here.attempt(name, label).restart.read_text())
    return found


def matching(command: Command, pattern: str) -> list[str]:
    return [line for line in command.lines if re.fullmatch(pattern, line)]


def metrics(here: Place, name: str) -> list[dict[str, float]]:
    """All but the speeds."""
    lines = [json.loads(line) for line in here.run_dir(name).metrics.read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]


def test_a_killed_rank_costs_its_run_a_few_steps_and_no_bit(here: Place) -> None:
    settings = ("train", "tiny.yaml", *HELD, "checkpoint.every_steps=3", "--nproc", "2")
    whole = here.start(*settings, "--run-name", "whole")
    restarts = ("launch.max_restarts=2", AT_ONCE, fault("sigkill", 11, rank=1))
    command = here.run(*settings, "--run-name", "cut", *restarts)
    whole.ends_with(0)
    assert command.lines.count("restart 1 of 2 in 0 s: from step_00000009 (2 steps will be replayed)") == 1
    assert matching(command, r"FAILED: rank 1 of 2 \(pid \d+\) at step 11: killed by SIGKILL \(out of memory\?\)")
    assert [line for line in command.lines if line.startswith("hint: ")] == []
    assert command.lines[-2:] == [
        "1 restart:",
        "  attempt 001 ended at step 11, rank 1: killed by SIGKILL (out of memory?); "
        "went on from step_00000009, 2 steps replayed",
    ]
    assert attempts(here, "cut") == ["001", "002"]
    facts = restart_of(here, "cut")
    assert (facts["after"], facts["checkpoint_step"], facts["steps_replayed"]) == ("001", 9, 2)
    assert here.run_dir("cut").weights.read_bytes() == here.run_dir("whole").weights.read_bytes()
    assert metrics(here, "cut") == metrics(here, "whole")
    assert [line["step"] for line in metrics(here, "cut") if "train/loss" in line] == list(range(1, 17))
    assert re.search(r"^cut +finished +16 ", here.run("runs").output, re.MULTILINE)
    assert list(here.temporary.iterdir()) == []


def test_what_happens_twice_is_not_tried_a_third_time(here: Place) -> None:
    """A broken checkpoint is passed over on the way, and the summary knows which one was used."""
    faults = "{kind: corrupt_checkpoint, step: 7, attempt: 1}, {kind: raise, step: 9, attempt: null}"
    settings = ("checkpoint.every_steps=2", "launch.max_restarts=9", AT_ONCE, f"faults=[{faults}]")
    command = here.run("train", "tiny.yaml", *settings, "--run-name", "x", code=1)
    assert attempts(here, "x") == ["001", "002", "003"]
    assert command.lines.count("restart 1 of 9 in 0 s: from step_00000006 (1 step will be replayed)") == 1
    assert matching(command, r"skipped \S+/step_00000006: .*SHA-256 differs.*")
    said = "rank 0: RuntimeError: injected on rank 0 at step 9"
    assert command.lines[-5:] == [
        "not restarted: the same has happened before, at step 9",
        "2 restarts:",
        "  attempt 001 ended at step 7, rank 0: killed by SIGKILL (out of memory?); "
        "went on from step_00000004, 3 steps replayed",
        f"  attempt 002 ended at step 9, {said}; went on from step_00000008, 1 step replayed",
        "hint: go on from step_00000008 with: python -m launch resume x",
    ]
    assert re.search(
        r"^x +failed +8 +rank 0 of 1 .* step 9: RuntimeError: injected on rank 0 at step 9 \(.*\)$",
        here.run("runs").output,
        re.MULTILINE,
    )


MISTAKES = {
    "settings": (("model.args={hidden: [16], depth: 3}",), 2, r"config error: model\.args do not fit mlp: .*"),
    "code": (
        ("model.name=mine:net", "model.args={}"),
        1,
        r"FAILED: .*: ModuleNotFoundError: No module named 'no_such_package'.*",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_that_a_rank_finds_are_not_tried_again(here: Place, mistake: str) -> None:
    (here.folder / "mine.py").write_text("import no_such_package\n")
    settings, code, said = MISTAKES[mistake]
    arguments = (*settings, "launch.max_restarts=5", AT_ONCE)
    command = here.run("train", "tiny.yaml", *arguments, "--run-name", "x", code=code)
    assert attempts(here, "x") == ["001"]
    assert len(matching(command, said)) == 1
    assert command.lines[-1].startswith("not restarted: ")


@pytest.mark.parametrize(("asks", "code"), [("SIGTERM", 75), ("SIGINT", 130), ("the stop file", 75)])
def test_a_stop_ends_the_wait_for_a_restart(here: Place, asks: str, code: int) -> None:
    settings = ("checkpoint.every_steps=3", "launch.max_restarts=1", "launch.restart_wait_s=60", fault("sigkill", 7))
    command = here.start("train", "tiny.yaml", *settings, "--run-name", "x")
    command.until(lambda: "restart 1 of 1 in 60 s" in command.output, "the wait")
    assert re.search(r"^x +running ", here.run("runs").output, re.MULTILINE)
    if asks == "the stop file":
        here.run_dir("x").stop.touch()
    else:
        command.process.send_signal(signal.Signals[asks])
    command.ends_with(code)
    again = "checkpoint step_00000006; go on with: python -m launch resume x"
    assert command.lines[-1] == f"stopped by {asks} before the restart; {again}"
    assert attempts(here, "x") == ["001"]
    assert here.run("resume", "x").lines[-1].startswith("done: ")


def test_a_stop_after_a_restart_saves_as_any_other(here: Place) -> None:
    endless = ("max_epochs=null", "max_steps=1000000", "eval.every_epochs=null")
    settings = (*endless, "launch.max_restarts=1", AT_ONCE, fault("exit", 3))
    command = here.start("train", "tiny.yaml", *settings, "--run-name", "x")
    command.until(lambda: here.attempt("x", "002").resumed.exists(), "the second attempt")
    command.process.terminate()
    command.ends_with(75)
    assert re.fullmatch(r"stopped by SIGTERM at step \d+; checkpoint step_\d+; go on with: .*", command.lines[-1])
    assert matching(command, r"  attempt 001 ended at step 3, rank 0: exit code 7; went on from the beginning.*")


def test_out_of_memory_goes_on_with_half_the_micro_batch_and_the_same_samples(here: Place) -> None:
    streamed = ("data.residency=stream", "data.num_workers=0", "checkpoint.every_steps=2", "--nproc", "2")
    reads = {name: here.folder / f"reads-{name}" for name in ("whole", "cut")}
    whole = here.start("train", "tiny.yaml", *streamed, "--run-name", "whole", READS=str(reads["whole"]))
    arguments = ("train", "tiny.yaml", *streamed, "--run-name", "cut", fault("oom", 5, rank=1))
    command = here.run(*arguments, READS=str(reads["cut"]))
    whole.ends_with(0)
    assert "Traceback" not in command.output
    said = (
        "a micro-batch of 4 does not fit in memory: at most 2 from now on, accumulated to the same global batch of the "
        "same samples; remembered in runs/cut/micro_batch.json, delete it to forget"
    )
    assert command.lines.count(said) == 1
    assert command.lines.count("restart: from step_00000004 (1 step will be replayed)") == 1
    batches = [line for line in command.lines if line.startswith("batch ")]
    assert ["accumulation 1" in line for line in batches] == [True, False]
    assert "per-device 2 x 2 processes x accumulation 2 = global 8" in batches[1]
    for rank in (0, 1):
        seen = {name: path.with_name(f"{path.name}.{rank}").read_text().split() for name, path in reads.items()}
        shape, *samples = seen["whole"]  # each attempt looks at the first sample before it begins
        assert len(samples) == 64
        assert seen["cut"] == [shape, *samples[: 6 * 4], shape, *samples[4 * 4 :]]
    plain = {line["step"]: line["train/loss"] for line in metrics(here, "whole") if "train/loss" in line}
    assert {line["step"]: line["train/loss"] for line in metrics(here, "cut") if "train/loss" in line} == pytest.approx(
        plain, rel=1e-4
    )
    _is_remembered_until_deleted(here)


def _is_remembered_until_deleted(here: Place) -> None:
    file = here.run_dir("cut").micro_batch

    def longer(epochs: int, *more: str) -> Command:
        return here.run("resume", "cut", f"max_epochs={epochs}", *more, "--nproc", "1", "--allow-changes")

    resumed = longer(3)
    note = "note: micro-batches of at most 2 samples: more ran out of memory, says runs/cut/micro_batch.json; "
    changed = "note: other settings than before: max_epochs: 2 -> 3"
    assert [line.startswith((changed, note)) for line in resumed.lines if line.startswith("note: ")] == [True, True]
    assert "per-device 2 x 1 process x accumulation 4 = global 8" in resumed.output
    smaller = longer(4, "max_per_device_batch_size=1")
    assert "per-device 1 x 1 process x accumulation 8 = global 8" in smaller.output
    assert "note: micro-batches" not in smaller.output
    file.unlink()
    assert "per-device 8 x 1 process x accumulation 1 = global 8" in longer(5, "max_per_device_batch_size=null").output


def test_out_of_memory_with_one_sample_is_the_end(here: Place) -> None:
    settings = ("max_per_device_batch_size=2", "checkpoint.every_steps=2", fault("oom", 3, attempt="null"))
    command = here.run("train", "tiny.yaml", *settings, "--run-name", "x", code=1)
    assert attempts(here, "x") == ["001", "002"]
    assert "per-device 1 x 1 process x accumulation 8 = global 8" in command.output
    why, title, past, hint = command.lines[-4:]
    assert why.startswith("not restarted: the micro-batch is one sample already; ")
    assert (title, past.startswith("  attempt 001 ended at step 3, ")) == ("1 restart:", True)
    assert hint == "hint: go on from step_00000002 with: python -m launch resume x"


def test_plan_finds_the_largest_micro_batch_and_leaves_nothing(here: Place) -> None:
    plan = here.run("plan", "tiny.yaml", "--probe-batch", "--nproc", "2")
    line = r"^fits +a rank's whole share of 4 samples at a time, by an estimate; nothing to set$"
    assert re.search(line, plan.output, re.MULTILINE)
    assert not (here.folder / "runs").exists()
    assert list(here.temporary.iterdir()) == []
