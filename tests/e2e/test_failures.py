"""A run that fails says last of all which rank failed, at which step, why, and where its log is."""

import re

import pytest

from tests.e2e.commands import Place, needs_proc
from trainer import checkpoint

pytestmark = needs_proc

CAUSES = {
    "Raises": r"rank 1 of 2 \(pid \d+\) at epoch 1 step 9: ValueError: boom-731 \(.*toys\.py:\d+\)",
    "Killed": r"rank 1 of 2 \(pid \d+\) at step 9: killed by SIGKILL \(out of memory\?\)",
    "Exits": r"rank 1 of 2 \(pid \d+\) at step 9: exit code 7",
    # All ranks know of a bad loss at the same moment.
    "NotFinite": r"all 2 ranks at epoch 1 step 9: the loss is not finite at step 9 on rank 1 .* "
    r"use a lower optim\.lr, optim\.max_grad_norm, or nonfinite: skip or rollback",
}


@pytest.mark.parametrize("how", CAUSES)
def test_the_first_failure_is_the_last_thing_on_the_screen(here: Place, how: str) -> None:
    model = (f"model.name=tests.dist.toys:{how}", "model.args={rank: 1, step: 9}")
    failed = here.run("train", "tiny.yaml", *model, "--run-name", "bad", "--nproc", "2", code=1)
    assert here.living() == []
    (cause,) = re.findall(r"^FAILED: (.*)$", failed.last_lines, re.MULTILINE)
    assert re.fullmatch(CAUSES[how], cause), failed.output
    (log,) = re.findall(r"^log: (.*)$", failed.last_lines, re.MULTILINE)
    assert (here.folder / log).is_file()
    assert failed.lines[-1] == "hint: go on from step_00000008 with: python -m launch resume bad"
    for text in ("ChildFailedError", "torch/distributed", "Traceback"):
        assert text not in failed.output
    assert list(here.temporary.iterdir()) == []


def test_a_checkpoint_that_does_not_fit_on_the_disk_loses_nothing(finished: Place) -> None:
    folder = finished.run_dir("done").checkpoints
    before = sorted(path.name for path in folder.iterdir())
    # 250 blocks of 512 or 1024 bytes, depending on the shell; the weights have 282,640 bytes.
    limited = ("sh", "-c", 'ulimit -f 250; exec "$@"', "sh")
    failed = finished.run("resume", "done", "max_epochs=3", "--allow-changes", wrapped_in=limited, code=3)
    said = (
        r"^environment error: `ulimit -f` lets this process write files of (128|256),000 bytes and the largest of a "
        r"checkpoint in \S+/checkpoints has 282,640; raise `ulimit -f`"
    )
    assert re.search(said, failed.last_lines, re.MULTILINE | re.IGNORECASE)
    assert "Traceback" not in failed.output
    assert sorted(path.name for path in folder.iterdir()) == before
    assert [checkpoint.fault_of(path) for path in checkpoint.step_folders(folder)] == [None, None]
