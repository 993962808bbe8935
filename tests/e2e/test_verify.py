"""The proofs that users run, with the real command: that they hold, and that they fail where they must."""

import re

import pytest

from tests.e2e.commands import ROOT, Place, needs_proc

pytestmark = needs_proc

SHORT = ("max_epochs=1", "model.args={hidden: [16]}")


def test_a_killed_run_is_proved_equal_with_dropout_too(here: Place) -> None:
    model = ("model.name=tests.dist.toys:WithDropout", "model.args={}")
    proof = here.run("verify", "resume", "tiny.yaml", "max_epochs=1", *model, "--kills", "2", "--nproc", "2")
    assert proof.lines[-1] == "3 of 3 hold"
    assert len(re.findall(r"^ok: sigkill\w* of rank [01] of 2 at step \d: exit 1", proof.output, re.MULTILINE)) == 2
    assert "equal: model, optimizer, rank_0, rank_1; 9 points of metrics; the samples of 8 batches" in proof.output
    assert list((here.folder / "runs").iterdir()) == []
    assert here.living() == []


def test_a_run_that_depends_on_the_clock_is_not_proved(here: Place) -> None:
    model = ("model.name=tests.e2e.toys:Unkeyed", "model.args={}")
    proof = here.run("verify", "resume", "tiny.yaml", "max_epochs=1", *model, "--kills", "1", code=1)
    assert re.search(r"^FAILED: the end at step 8: another run$", proof.output, re.MULTILINE)
    assert "/model.safetensors differs" in proof.output
    (kept,) = re.findall(r"^the runs of this proof are kept in (\S+)$", proof.output, re.MULTILINE)
    assert (here.folder / kept / "cut" / "metrics.jsonl").is_file()


def test_topology_holds_without_and_fails_with_batchnorm(here: Place) -> None:
    proof = here.run("verify", "topology", "tiny.yaml", *SHORT, "--nproc", "1,3")
    assert re.search(r"^ok: 3 against 1: the same samples; weights within \de-1[5-9]$", proof.output, re.MULTILINE)
    model = ("model.name=tests.dist.toys:WithBatchNorm", "model.args={}")
    failed = here.run("verify", "topology", "tiny.yaml", "max_epochs=1", *model, "--nproc", "1,2", code=1)
    assert (
        "by its nature: features.1 (BatchNorm2d: its statistics are those of a rank's part of the batch)"
        in failed.output
    )
    assert "samples of batch" not in failed.output


def test_equal_bits_on_any_number_of_processes(here: Place) -> None:
    """BatchNorm and dropout, with the cores' own number of threads."""
    model = ("model.name=tests.e2e.toys:Held", "model.args={}", "max_epochs=1", "launch.num_threads=null")
    proof = here.run("verify", "topology", "tiny.yaml", *model, "--nproc", "1,2,4", "--bitwise")
    assert proof.lines[0] == "virtual_shards=4 (the largest of --nproc 1,2,4)"
    assert proof.output.count("0 differing bits in model, optimizer, rank_0; 9 points of metrics") == 4
    chained = here.run("verify", "resume", "tiny.yaml", *model, "--nproc", "4,1,2", "--kills", "2")
    assert chained.lines[-1] == "3 of 3 hold"
    for arguments, said in (
        (("--nproc", "1,3"), "--nproc 3: only powers of two have equal bits"),
        (
            ("--nproc", "1,4", "virtual_shards=2"),
            "virtual_shards=2 does not divide over 4 processes; use one of 1, 2 proc",
        ),
    ):
        (line,) = here.run("verify", "topology", "tiny.yaml", *arguments, "--bitwise", code=2).lines
        assert said in line


@pytest.mark.parametrize("preset", ["mnist", "tutorial"])
def test_the_presets_have_equal_bits(here: Place, preset: str) -> None:
    short = (*("max_epochs=null", "max_steps=3", "log.every_steps=1"), "data.root=" + str(ROOT / "data"))
    proof = here.run("verify", "topology", str(ROOT / f"configs/{preset}.yaml"), *short, "--nproc", "2,1", "--bitwise")
    assert proof.lines[-1] == "1 of 1 hold"
    assert "0 differing bits in " in proof.output


def test_faults_of_one_kind(here: Place) -> None:
    proof = here.run("verify", "faults", "tiny.yaml", *SHORT, "--only", "nan")
    assert proof.lines[-1] == "3 of 3 hold"
    assert "| nan, nonfinite=rollback" in proof.output


def test_a_run_that_fails_by_itself_is_no_proof(here: Place) -> None:
    proof = here.run(
        "verify", "resume", "tiny.yaml", "max_epochs=1", "model.name=tests.dist.toys:Raises", "model.args={}", code=1
    )
    assert "the run fails by itself, exit code 1: FAILED: rank 0 of 1" in proof.output


def test_what_cannot_be_proved_is_refused_before_anything_runs(here: Place) -> None:
    for arguments, said in (
        (("topology", "tiny.yaml", "--nproc", "2"), "give two numbers of processes or more"),
        (("faults", "tiny.yaml", "--nproc", "auto"), "give a number"),
        (("resume", "tiny.yaml", "optim.lrr=1"), "did you mean 'optim.lr'"),
    ):
        (line,) = here.run("verify", *arguments, code=2).lines
        assert said in line
    assert not (here.folder / "runs").exists()
