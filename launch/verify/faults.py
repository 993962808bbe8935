"""`verify faults`: every fault that can be injected, on the user's own configuration, against what is promised."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from configs.errors import EXIT_DONE, EXIT_STOPPED, EXIT_TRAINING, TrainingError
from configs.sections import FaultKind
from launch.verify import compare
from launch.verify.runs import Ended, Place
from launch.verify.table import Row, Table

Check = Callable[[Ended, Ended], list[str]]
"""Problems of (uninterrupted run, this one)."""


class Case(NamedTuple):
    """One fault, with a setting or without; how the run ends, what its screen must say, and what is compared then.

    One that does not end with 0 is gone on with first.
    """

    kind: FaultKind
    code: int
    says: str
    setting: str = ""
    check: Check = compare.bits

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.setting}" if self.setting else self.kind


def _left_out(counter: str, whole: Ended, ended: Ended) -> list[str]:
    """One batch was left out, and the samples of all are the same."""
    count, usual = (run.state()["train_state"][counter] for run in (ended, whole))
    return ([] if count == usual + 1 else [f"{counter} is {count}, expected {usual + 1}"]) + compare.samples(
        whole, ended
    )


SHOWN = 90
"""Characters of a run's last line that a table has room for."""
EXPECTED = {
    EXIT_TRAINING: "exit 1 and the cause; gone on with, the same bits",
    EXIT_STOPPED: "exit 75 and a checkpoint; gone on with, the same bits",
    EXIT_DONE: "ends well by itself",
}
CASES = (
    Case("sigterm", EXIT_STOPPED, "stopped by SIGTERM"),
    Case("sigkill", EXIT_TRAINING, "killed by SIGKILL"),
    Case("sigkill", EXIT_DONE, "restart 1 of 1", "launch.max_restarts=1"),
    Case("sigkill_in_save", EXIT_TRAINING, "killed by SIGKILL"),
    Case("exit", EXIT_TRAINING, "exit code 7"),
    Case("raise", EXIT_TRAINING, "injected on rank"),
    Case("hang", EXIT_TRAINING, "hangs"),
    Case("sigstop", EXIT_TRAINING, "stopped (SIGSTOP)"),
    Case("slow", EXIT_DONE, "done:"),
    Case("nan", EXIT_TRAINING, "not finite", "nonfinite=stop"),
    Case("nan", EXIT_DONE, "dropped the update", "nonfinite=skip", partial(_left_out, "dropped")),
    Case("nan", EXIT_DONE, "rollback 1 of", "nonfinite=rollback", partial(_left_out, "rollbacks")),
    Case("oom", EXIT_DONE, "out of memory", check=compare.samples),
    Case("corrupt_checkpoint", EXIT_TRAINING, "skipped"),
)


def verify_faults(place: Place, nproc: int, hang_timeout_s: float, only: FaultKind | None) -> int:
    """Have each fault (`only` those of one kind) on the last rank in the middle of a run. Returns the exit code."""
    whole = place.reference(nproc)
    steps = int(whole.state()["train_state"]["step"])
    if steps < 4:
        raise TrainingError(f"a run of {steps} steps is too short to have faults in; make it 4 or longer")
    settings = [f"launch.hang_timeout_s={hang_timeout_s}", *place.frequent_checkpoints(steps)]
    table = Table("fault")
    for number, case in enumerate(case for case in CASES if only in (None, case.kind)):
        fault = f"faults=[{{kind: {case.kind}, rank: {nproc - 1}, step: {steps // 2}}}]"
        own = [fault, *settings, *([case.setting] if case.setting else [])]
        table.add(_try(case, whole, partial(place.train, f"case-{number}", *own, nproc=nproc)))
    return table.conclude()


def _try(case: Case, whole: Ended, start: Callable[[], Ended]) -> Row:
    """`start` starts the run, and the second time goes on with it."""
    ended = start()
    code, problems = ended.code, ended.unlike(case.code)
    if case.code != EXIT_DONE and not problems:
        ended = start()
        problems = ended.unlike(EXIT_DONE)
    said = next((line for line in ended.output.splitlines() if case.says in line), None)
    if said is None:
        problems.append(f"the screen does not say {case.says!r}; see {ended.log}")
    problems = problems or ended.lost() + case.check(whole, ended)
    return Row(case.name, EXPECTED[case.code], f"exit {code}: {_short(said or ended.last_line)}", problems)


def _short(line: str) -> str:
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."
