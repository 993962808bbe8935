"""Who hangs, who waits and who is slow, from beats and stacks that are made up."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from configs import beat
from configs.beat import (
    BOUNDARY,
    COMPUTE,
    DATA,
    EVALUATION,
    FINISHING,
    LAYOUT,
    SAVING,
    STARTING,
    UPDATE,
    WAITING,
    Beat,
    open_beat,
    read_beat,
)
from configs.run_dir import AttemptDir
from launch import stacks, watch
from launch.processes import Process, find_process
from launch.stacks import Frame, Stack, is_complete, main_stack, own_frame, waits_for_others
from launch.watch import Scene, Sight, Watch, collect_stacks, explain, is_hung, last_ranks, limit_s, note_on_slow

HERE = Path("/home/me")
OWN = [Frame("/venv/site-packages/torch/nn/module.py", "5", "call"), Frame("/home/me/toys.py", "31", "forward")]
GLOO = [Frame("/venv/site-packages/torch/distributed/distributed_c10d.py", "9", "barrier"), *OWN]
CUDA = [Frame("/venv/lib64/torch/cuda/streams.py", "9", "synchronize"), Frame("/home/me/agreement.py", "3", "read")]


def at(phase: int, step: int = 7, median_s: float = 0.2) -> Beat:
    return Beat(phase, step, 1e9, median_s, 0, 1e9)


def sight(phase: int, step: int = 7, idle_s: float = 61.0, *, stopped: bool = False, **more: Any) -> Sight:
    return Sight(at(phase, step, more.get("median_s", 0.2)), idle_s, more.get("step_s", idle_s), stopped)


@pytest.mark.parametrize(
    ("seen", "timeout_s", "limit"),
    [
        (at(COMPUTE, median_s=0.2), None, 60.0),
        (at(COMPUTE, median_s=5.0), None, 100.0),
        (at(DATA, median_s=5.0), 10.0, 10.0),
        (at(WAITING), 10.0, 10.0),
        (at(UPDATE), 10.0, 10.0),
        (at(COMPUTE, median_s=0.0), None, 600.0),  # the first step of an attempt: it may compile
        (at(COMPUTE, median_s=0.0), 10.0, 100.0),
        (at(STARTING, median_s=0.0), 10.0, 100.0),
        (at(EVALUATION, median_s=0.2), None, 600.0),
        (at(SAVING, median_s=5.0), None, 1000.0),
        (at(BOUNDARY, median_s=0.2), 3.0, 30.0),
        (at(FINISHING, median_s=0.2), 3.0, 30.0),
    ],
)
def test_limits(seen: Beat, timeout_s: float | None, limit: float) -> None:
    assert limit_s(seen, timeout_s) == limit


@pytest.mark.parametrize(
    ("sights", "last"),
    [
        ({0: sight(WAITING), 1: sight(COMPUTE)}, [1]),
        ({0: sight(DATA, 8), 1: sight(WAITING, 7)}, [1]),
        ({0: sight(EVALUATION, 8), 1: sight(UPDATE, 7)}, [1]),
        ({0: sight(EVALUATION, 8), 1: sight(DATA, 8), 2: sight(SAVING, 8)}, [0]),
        ({0: sight(WAITING), 1: sight(WAITING)}, [0, 1]),
        ({0: sight(STARTING, 0), 1: sight(COMPUTE, 0)}, [0]),
    ],
)
def test_the_last_ranks_have_the_least_progress(sights: Mapping[int, Sight], last: list[int]) -> None:
    assert last_ranks(sights) == last


@pytest.mark.parametrize(
    ("sights", "hung"),
    [
        ({}, False),
        ({0: sight(COMPUTE, idle_s=59)}, False),
        ({0: sight(COMPUTE, idle_s=61)}, True),
        ({0: sight(WAITING, idle_s=61), 1: sight(COMPUTE, idle_s=61)}, True),
        # The others have waited for long, and the last one gets on.
        ({0: sight(WAITING, idle_s=100), 1: sight(DATA, idle_s=1)}, False),
        ({0: sight(DATA, 8, idle_s=100), 1: sight(EVALUATION, 8, idle_s=100)}, False),
        # In evaluation by rank 0 alone the others only wait for its next batch.
        ({0: sight(EVALUATION, idle_s=1), 1: sight(EVALUATION, idle_s=601)}, False),
        ({0: sight(EVALUATION, idle_s=601), 1: sight(EVALUATION, idle_s=601)}, True),
        ({0: sight(SAVING, idle_s=599), 1: sight(SAVING, idle_s=599)}, False),
        ({0: sight(COMPUTE, idle_s=599, median_s=0.0)}, False),
    ],
)
def test_hung_is_who_does_not_get_on(sights: Mapping[int, Sight], hung: bool) -> None:
    assert is_hung(sights, None) == hung


def test_a_rank_that_was_not_seen_yet_has_as_long_as_start_up() -> None:
    for idle_s, hung in ((61, False), (601, True)):
        assert is_hung({0: sight(WAITING, idle_s=idle_s)}, None, all_started=False) == hung


def told(sights: Mapping[int, Sight], of: Mapping[int, Stack], world_size: int | None = None, local: int = 0) -> str:
    world_size = world_size or len(sights)
    return explain(Scene(sights, of, world_size, local or len(sights), HERE)).sentence


def test_three_ways_not_to_arrive_are_three_sentences() -> None:
    assert told({0: sight(WAITING), 1: sight(COMPUTE)}, {0: OWN, 1: OWN}) == (
        "rank 1 of 2 hangs at step 7: in toys.py:31 forward (waited 61 s, launch.hang_timeout_s)"
    )
    assert told({0: sight(WAITING), 1: sight(COMPUTE, stopped=True)}, {0: OWN}) == (
        "rank 1 was stopped (SIGSTOP) at step 7; the others waited 61 s for it; "
        "continue a stopped process with kill -CONT"
    )
    assert told({0: sight(WAITING), 1: sight(COMPUTE)}, {0: OWN, 1: GLOO}) == (
        "the ranks wait for each other: rank 1 at step 7 in toys.py:31 forward, "
        "rank 0 at step 7 with its own gradients computed (waited 61 s, launch.hang_timeout_s)"
    )


def test_one_process_waits_for_nobody() -> None:
    assert told({0: sight(COMPUTE)}, {0: GLOO}).startswith("rank 0 of 1 hangs at step 7: in toys.py:31 forward")
    assert told({0: sight(COMPUTE, stopped=True)}, {}).startswith("rank 0 was stopped (SIGSTOP) at step 7; for 61 s;")


def test_ranks_in_one_phase_are_told_apart_by_their_stacks() -> None:
    """As in an evaluation, a save or start-up: one works, the others are in a collective."""
    start = {rank: sight(STARTING, 0, 601) for rank in range(3)}
    assert told(start, {0: GLOO, 1: GLOO, 2: OWN}) == (
        "rank 2 of 3 hangs in start-up: in toys.py:31 forward (waited 601 s, 10 times launch.hang_timeout_s)"
    )
    evaluation = {rank: sight(EVALUATION, 8, 601) for rank in range(2)}
    assert told(evaluation, {0: OWN, 1: GLOO}).startswith("rank 0 of 2 hangs in the evaluation after step 8: ")
    waiting_for_gpu = {0: sight(UPDATE, 8), 1: sight(COMPUTE, 8)}
    assert told(waiting_for_gpu, {0: CUDA, 1: CUDA}).startswith("the ranks wait for each other: rank 1 ")


def test_a_rank_that_does_not_answer_is_named_all_the_same() -> None:
    assert "rank 1 of 2 hangs at step 7: and does not say where" in told({0: sight(WAITING), 1: sight(DATA)}, {0: OWN})


def test_a_node_whose_ranks_all_wait_says_so() -> None:
    both = {2: sight(WAITING), 3: sight(WAITING)}
    assert told(both, {2: OWN, 3: OWN}, 4).startswith("all ranks of this node wait for those of other nodes")
    assert told({0: sight(STARTING, 0)}, {0: GLOO}, 2, 2).startswith("1 rank never arrived, and the others wait: ")


@pytest.mark.parametrize(
    ("sights", "note"),
    [
        ({0: sight(WAITING, 8, 12), 1: sight(COMPUTE, 8, 12)}, "note: rank 1 is slow: its step 8 has taken 12 s, "),
        ({0: sight(WAITING, 8, 12), 1: sight(COMPUTE, 8, 9)}, None),
        ({0: sight(WAITING, 8, 12), 1: sight(COMPUTE, 8, 12, median_s=2.0)}, None),
        ({0: sight(WAITING, 8, 12), 1: sight(COMPUTE, 8, 12, median_s=0.0)}, None),
        ({0: sight(WAITING, 8, 12), 1: sight(WAITING, 8, 12)}, None),
        ({0: sight(EVALUATION, 8, 99, step_s=0.0), 1: sight(EVALUATION, 8, 99, step_s=0.0)}, None),
        ({0: sight(WAITING, 8, 12), 1: sight(COMPUTE, 8, 12, stopped=True)}, "note: rank 1 was stopped (SIGSTOP) in "),
    ],
)
def test_a_note_on_who_is_slow(sights: Mapping[int, Sight], note: str | None) -> None:
    found = note_on_slow(sights, {0: 4242, 1: 4243}, 2)
    assert (found or "").startswith(note or "")
    assert (found is None) == (note is None)


def test_the_whole_note() -> None:
    waits = {0: sight(WAITING, 8, 12), 1: sight(COMPUTE, 8, 12)}
    slow = "note: rank 1 is slow: its step 8 has taken 12 s, the median is 0.2 s"
    assert note_on_slow(waits, {}, 2) == f"{slow}; the others wait for it"
    assert note_on_slow({1: waits[1]}, {}, 1) == slow
    stopped = {1: sight(COMPUTE, 8, 12, stopped=True)}
    assert (note_on_slow(stopped, {1: 4243}, 2) or "").endswith("continue it with: kill -CONT 4243")


DUMP = """\
step 3
Thread 0x00007fa5092776c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007fa5e4a21b80 (most recent call first):
  File "/venv/site-packages/torch/autograd/graph.py", line 1072 in _engine_run_backward
  File "/home/me/a b/loop.py", line 84 in train_step
  File "/opt/lockstep/trainer/__main__.py", line 146 in <module>
  File "<frozen runpy>", line 198 in _run_module_as_main
"""


def test_the_main_thread_is_the_last_of_a_dump() -> None:
    found = main_stack(DUMP)
    assert len(found) == 4
    assert found[0] == ("/venv/site-packages/torch/autograd/graph.py", "1072", "_engine_run_backward")
    assert own_frame(found).shown(HERE) == "a b/loop.py:84 train_step"
    assert main_stack("no stacks here\n") == []


def test_a_dump_is_complete_with_the_main_threads_outermost_frame() -> None:
    assert is_complete(DUMP)
    cuts = [cut for cut in range(len(DUMP)) if is_complete(DUMP[:cut])]
    assert cuts
    assert min(cuts) > DUMP.index("in <module>")
    assert not is_complete("")


def test_own_frame_is_the_innermost_outside_installed_packages() -> None:
    assert own_frame(OWN).shown(HERE) == "toys.py:31 forward"
    assert own_frame(OWN).shown(Path("/elsewhere")) == "/home/me/toys.py:31 forward"
    inside = [Frame("/venv/site-packages/a.py", "1", "f"), Frame("<frozen runpy>", "2", "g")]
    assert own_frame(inside) == inside[0]
    assert (waits_for_others(GLOO), waits_for_others(CUDA), waits_for_others(OWN)) == (True, True, False)


def test_a_beat_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "beat-rank0"
    assert read_beat(path) is None
    page = open_beat(path)
    assert read_beat(path) is None  # there is none yet
    LAYOUT.pack_into(page, 0, *at(EVALUATION, 9))
    assert read_beat(path) == at(EVALUATION, 9)
    path.write_bytes(b"junk")
    assert read_beat(path) is None


def test_where_memory_cannot_be_shared_nobody_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = beat.mmap.mmap

    def refuses(fileno: int, length: int) -> Any:
        if fileno >= 0:
            raise OSError
        return real(fileno, length)

    monkeypatch.setattr(beat.mmap, "mmap", refuses)
    LAYOUT.pack_into(open_beat(tmp_path / "beat-rank0"), 0, *at(COMPUTE))
    assert list(tmp_path.iterdir()) == []


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Beating:
    """One rank, this process, with a beat that the test changes, seen by a watch on the test's clock."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.clock, self.page = clock, open_beat(folder / "beat-rank0")
        self.attempt, self.watch = AttemptDir(folder), Watch(AttemptDir(folder))
        self.count = 0
        process = find_process(os.getpid())
        assert process is not None
        self.process = process

    def write(self, phase: int, step: int) -> None:
        self.count += 1
        LAYOUT.pack_into(self.page, 0, *at(phase, step)._replace(time=1e9 + self.count))

    def after(self, seconds: float) -> Sight:
        """What is seen, by looks every quarter of a second."""
        seen = {}
        for _ in range(max(1, round(seconds / watch.LOOK_S))):
            self.clock.now += min(seconds, watch.LOOK_S)
            seen = self.watch.look({0: self.process})
        return seen[0]


@pytest.fixture
def beating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Beating:
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    return Beating(tmp_path, clock)


def test_a_rank_is_idle_since_its_last_beat_and_in_a_step_since_its_data(beating: Beating) -> None:
    beating.write(EVALUATION, 8)
    beating.after(0)
    assert (beating.after(20).idle_s, beating.after(0).step_s) == (20, 0)
    beating.write(DATA, 8)
    assert (beating.after(0).idle_s, beating.after(0).step_s) == (0, 0)
    assert beating.after(5).step_s == 5
    beating.write(COMPUTE, 8)
    assert beating.after(0) == Sight(at(COMPUTE, 8)._replace(time=1e9 + 3), 0, 5)
    beating.write(COMPUTE, 9)
    assert beating.after(0).step_s == 0


def test_time_in_which_the_launcher_itself_stood_still_does_not_count(beating: Beating) -> None:
    """A laptop that slept, a container that was paused, a Ctrl-Z for all."""
    beating.write(COMPUTE, 8)
    beating.after(0)
    beating.clock.now += 100_000
    assert beating.after(0).idle_s <= 1


def test_a_rank_that_has_ended_is_not_watched(beating: Beating) -> None:
    beating.write(COMPUTE, 8)
    beating.attempt.outcome(0).write_text("{}")
    assert beating.watch.look({0: beating.process}) == {}


def test_a_note_comes_once_a_minute(beating: Beating) -> None:
    beating.write(COMPUTE, 8)
    notes = 0
    for _ in range(130):
        beating.after(1)
        notes += beating.watch.may_note()
    assert notes == 3  # after 1, 61 and 121 seconds


def test_a_hang_has_the_flight_recorder_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (watch, stacks):
        monkeypatch.setattr(module, "DUMP_S", 0.0)
    attempt = AttemptDir(tmp_path)
    pipe = tmp_path / "nccl-1.pipe"
    os.mkfifo(pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    gone = Process(2**22 + 1, "never")  # no pid is that large: nobody is signalled
    ranks, sights = {0: gone, 1: gone}, {0: sight(WAITING), 1: sight(COMPUTE)}
    assert collect_stacks(attempt, ranks, sights, str(tmp_path / "nccl-")) == {}  # rank 0 has no pipe
    assert os.read(reading, 9)
    os.close(reading)
