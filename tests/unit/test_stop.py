import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from configs.contract import Outcome
from configs.run_dir import STOP_SIGNALS as NAMES
from configs.run_dir import AttemptDir
from launch.signals import blocked_for_children
from trainer.peers import PeerError, failed_peer
from trainer.stop import StopFlag, grace_note

STOP_SIGNALS = [signal.Signals[name] for name in NAMES]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_sets_the_flag(number: signal.Signals) -> None:
    stop = StopFlag()
    stop.install()
    assert not stop.is_set
    os.kill(os.getpid(), number)
    assert stop.is_set
    assert stop.signal == number.name


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_from_before_the_handlers_stood_is_not_lost(number: signal.Signals) -> None:
    """The launcher starts the ranks with these signals blocked. In a process of its own: this one may have threads."""
    code = "import os, sys; os.kill(os.getpid(), int(sys.argv[1])); from trainer.stop import StopFlag; "
    code += "stop = StopFlag(); before = stop.is_set; stop.install(); print(before, stop.signal)"
    command = [sys.executable, "-c", code, str(int(number))]
    with blocked_for_children():
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told == f"False {number.name}\n"


def test_first_signal_is_the_one_that_is_told() -> None:
    stop = StopFlag()
    stop.install()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signal == "SIGINT"


def test_request_from_before_the_handlers_stood_is_found(tmp_path: Path) -> None:
    (tmp_path / "stop.json").write_text(json.dumps({"signal": "SIGINT"}))
    stop = StopFlag()
    stop.look_for(tmp_path / "stop.json")
    assert stop.signal == "SIGINT"


def rank_one(attempt: AttemptDir, pid: int, status: Literal["failed", "stopped", "done"] | None) -> StopFlag:
    """The flag of rank 0 after a SIGTERM, beside a rank 1 with this pid and outcome."""
    attempt.path.mkdir()
    attempt.pid(0).write_text(str(os.getpid()))
    attempt.pid(1).write_text(str(pid))
    if status:
        Outcome(1, status, 0.0).save(attempt.outcome(1))
    stop = StopFlag()
    stop.failed_peer = partial(failed_peer, attempt, 0)
    assert not stop.is_set
    stop.set("SIGTERM")
    return stop


@pytest.mark.parametrize(("lives", "status"), [(True, "failed"), (False, "failed"), (False, None)])
def test_a_signal_because_a_peer_is_gone_is_no_stop(
    tmp_path: Path, lives: bool, status: Literal["failed"] | None
) -> None:
    stop = rank_one(AttemptDir(tmp_path / "001"), os.getpid() if lives else ended_pid(), status)
    with pytest.raises(PeerError, match="rank 1 is gone"):
        _ = stop.is_set


@pytest.mark.parametrize(("lives", "status"), [(True, None), (False, "stopped"), (False, "done")])
def test_a_signal_beside_peers_that_are_well_is_one(
    tmp_path: Path, lives: bool, status: Literal["stopped", "done"] | None
) -> None:
    assert rank_one(AttemptDir(tmp_path / "001"), os.getpid() if lives else ended_pid(), status).is_set


def ended_pid() -> int:
    """Of a process that was, and was collected."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def test_no_request_is_no_stop(tmp_path: Path) -> None:
    stop = StopFlag()
    stop.look_for(tmp_path / "stop.json")
    assert not stop.is_set


@pytest.mark.parametrize(
    ("save_s", "grace_s", "said"), [(1, 30, False), (23, 30, False), (25, 30, True), (40, 30, True)]
)
def test_a_save_that_takes_the_time_of_a_stop_is_told(save_s: float, grace_s: float, said: bool) -> None:
    note = grace_note(save_s, grace_s)
    assert (note is not None) == said
    assert note is None or f"a save takes {save_s} s and launch.grace_s is 30 s: raise it" in note
