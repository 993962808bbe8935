"""`--launcher fork`: one import of torch for all ranks, and everything else as with torchrun."""

import json
import os
import re
import signal
from pathlib import Path

from configs.contract import Outcome
from tests.e2e.commands import Place, needs_proc, until

pytestmark = needs_proc

TWO = ("--nproc", "2", "--launcher", "fork")
HELD = ("model.name=tests.e2e.toys:Held", "model.args={}")


def parent_of_ranks(here: Place, label: str = "001") -> int:
    stat = Path(f"/proc/{here.attempt('x', label).pid(0).read_text()}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def test_the_bits_are_those_of_torchrun(here: Place) -> None:
    here.run("train", "tiny.yaml", *HELD, "--run-name", "torchrun", "--nproc", "2")
    done = here.run("train", "tiny.yaml", *HELD, "--run-name", "fork", *TWO)
    assert done.lines[-1].startswith("done: ")
    forked, usual = here.run_dir("fork"), here.run_dir("torchrun")
    assert forked.weights.read_bytes() == usual.weights.read_bytes()
    assert here.attempt("fork").rank_log(1).exists()
    assert list(here.temporary.iterdir()) == []


def test_what_forks_has_one_thread_and_no_socket_and_a_signal_to_it_stops_the_run(here: Place) -> None:
    command = here.start("train", "tiny.yaml", *HELD, "--run-name", "x", *TWO, HOLD_AT="9")
    command.until(here.held(2), "two ranks in the second epoch")
    parent = parent_of_ranks(here)
    threads = list(Path(f"/proc/{parent}/task").iterdir())
    opened = [str(link.readlink()) for link in Path(f"/proc/{parent}/fd").iterdir()]
    os.kill(parent, signal.SIGTERM)
    until(here.attempt("x").stop_request.exists, "the launcher to hear of it")
    (here.hold / "go").touch()
    command.ends_with(75)
    assert len(threads) == 1
    assert [name for name in opened if name.startswith("socket:") or "nvidia" in name] == []
    found = re.fullmatch(r"stopped by SIGTERM at step (\d+); checkpoint step_0*\1; go on with: .*", command.lines[-1])
    assert found, command.output
    again = here.run("resume", "x")
    assert json.loads(here.attempt("x", "002").plan.read_text())["launcher"] == "fork"
    assert again.lines[-1].startswith("done: ")


def test_a_rank_that_is_killed_is_named_and_the_others_end(here: Place) -> None:
    fault = "faults=[{kind: sigkill, rank: 1, step: 9}]"
    failed = here.run("train", "tiny.yaml", fault, "--run-name", "x", *TWO, code=1)
    said = r"^FAILED: rank 1 of 2 \(pid \d+\) at step 9: killed by SIGKILL \(out of memory\?\)$"
    assert re.search(said, failed.output, re.MULTILINE), failed.output
    outcome = Outcome.load(here.attempt("x").outcome(0))
    assert outcome is not None
    assert (outcome.status, outcome.kind) == ("failed", "peer")
    assert here.living() == []


def test_the_ranks_end_with_what_forked_them(here: Place) -> None:
    command = here.start("train", "tiny.yaml", *HELD, "--run-name", "x", *TWO, HOLD_AT="2")
    command.until(here.held(2), "two ranks that are stuck")
    os.kill(parent_of_ranks(here), signal.SIGKILL)
    command.ends_with(1)
    assert re.search(r"^FAILED: the process that forks the ranks was killed by SIGKILL", command.output, re.MULTILINE)
    assert here.living() == []


def test_one_process_needs_no_fork_and_several_nodes_are_refused(here: Place) -> None:
    here.run("train", "tiny.yaml", "--run-name", "one", "--launcher", "fork")
    assert json.loads(here.attempt("one").plan.read_text())["launcher"] == "direct"
    nodes = ("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:29400", "--run-name", "x")
    refused = here.run("train", "tiny.yaml", *nodes, *TWO, code=2)
    assert "--launcher fork is for one machine; use --launcher torchrun for several nodes" in refused.output
