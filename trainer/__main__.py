"""Entry of one rank: `python -m trainer ATTEMPT_DIR`. First its own log,
then the signals, then torch; errors become an outcome file."""

import contextlib
import errno
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path

from configs.contract import OUT_OF_MEMORY, Outcome, WorkerPlan, write_atomically
from configs.errors import EXIT_CONFIG, EXIT_ENVIRONMENT, EXIT_TRAINING, ConfigError, EnvironmentProblem, LockstepError
from configs.run_dir import AttemptDir, RunDir
from trainer.account import Account
from trainer.exits import leave
from trainer.memory import is_out_of_memory
from trainer.parent import die_with_parent
from trainer.peers import failed_peer
from trainer.places import place_of
from trainer.stop import StopFlag

# Errors of the machine, not of the run: no space, quota, file too large, read-only, bad disk, too many open files.
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
_ONE_VALUE = "Expected more than 1 value per channel"
"""How BatchNorm's ValueError begins where a batch has one sample of one pixel."""
_OF_COMPILER = "TorchDynamoException"
"""What torch.compile raises where there is no C++ compiler, or for a network that it cannot compile."""


def main(attempt: AttemptDir) -> int:
    """Run one rank; returns its exit code. Whatever happens is told in the outcome file."""
    try:
        return _run(attempt, int(os.environ.get("RANK", "0")))
    except OSError as error:  # a full disk: not even the log or the outcome can be written
        with contextlib.suppress(OSError):
            print(f"{EnvironmentProblem.kind}: {error}", file=sys.stderr, flush=True)
        return EXIT_ENVIRONMENT


def _run(attempt: AttemptDir, rank: int) -> int:
    gc.disable()  # importing torch makes half a million objects; looking through them again and again takes 0.4 s
    die_with_parent()
    _redirect(attempt.rank_log(rank))
    # What the launcher sends to a rank that hangs. In C: works inside a collective too, where Python does not come by.
    faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)
    stop = StopFlag()
    stop.install()
    account = Account(attempt, rank)
    write_atomically(attempt.pid(rank), str(os.getpid()))
    stop.failed_peer = partial(failed_peer, attempt, rank)
    # After the pid file: a launcher that wrote its request before has not seen the pid, one that writes it later has.
    stop.look_for(attempt.stop_request)
    warnings.formatwarning = _plain_warning
    run = None
    try:
        from trainer.run import Run

        account.beat()
        plan = WorkerPlan.load(attempt.plan)
        run = Run(plan, RunDir(attempt.path.parent.parent), attempt, stop, account)
        ending = run.train() if plan.mode == "train" else run.evaluate()
        outcome = Outcome(
            rank,
            "done" if ending.is_finished else "stopped",
            time.time(),
            step=ending.step,
            epoch=ending.epoch,
            checkpoint=ending.checkpoint,
            signal=stop.signal,
        )
    except BaseException as error:
        outcome = _failure(rank, error, run)
        # Rank 0's log is the screen, where the launcher tells what is known as the last thing.
        is_told = isinstance(error, LockstepError) or outcome.kind in ("peer", OUT_OF_MEMORY, ConfigError.kind)
        if rank != 0 or not is_told:
            with contextlib.suppress(OSError):
                traceback.print_exc()
    if run is not None:
        run.tidy_up()
    outcome.save(attempt.outcome(rank))
    return outcome.exit_code


def _failure(rank: int, error: BaseException, run: object) -> Outcome:
    kind, exit_code = _classify(error)
    state = getattr(getattr(run, "job", None), "state", None)
    return Outcome(
        rank,
        "failed",
        time.time(),
        exit_code=exit_code,
        step=getattr(state, "step", None),
        epoch=getattr(state, "epoch", None),
        kind=kind,
        message=_message(error),
        where=place_of(error),
    )


def _classify(error: BaseException) -> tuple[str, int]:
    """The outcome's kind and exit code."""
    if isinstance(error, LockstepError):
        return error.kind, error.exit_code
    if isinstance(error, OSError) and error.errno in _MACHINE:
        return EnvironmentProblem.kind, EXIT_ENVIRONMENT
    if is_out_of_memory(error):
        return OUT_OF_MEMORY, EXIT_TRAINING
    if str(error).startswith(_ONE_VALUE):
        return ConfigError.kind, EXIT_CONFIG
    names = {cls.__name__ for cls in type(error).__mro__}
    if _OF_COMPILER in names:
        return ConfigError.kind, EXIT_CONFIG
    if "AcceleratorError" in names:  # the GPU is gone or broken
        return EnvironmentProblem.kind, EXIT_ENVIRONMENT
    # gloo names its own source file in each message; torch.distributed's errors have a base class of their own.
    from_peer = (
        "DistError" in names
        or "DistBackendError" in names
        or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
    )
    if from_peer and os.environ.get("WORLD_SIZE", "1") != "1":
        return "peer", EXIT_TRAINING
    return type(error).__name__, EXIT_TRAINING


def _message(error: BaseException) -> str:
    """The error's text; of one that a loader worker passed on, with its stack, the line that says what it was."""
    text = str(error).strip()
    if text.startswith(_ONE_VALUE):
        text += "; BatchNorm needs two samples: use drop_last=true, a larger batch, or fewer processes or shards"
    if any(cls.__name__ == _OF_COMPILER for cls in type(error).__mro__):
        return f"torch.compile: {text.splitlines()[0]}; use compile: false and steps_per_execution: 1"
    return (text.splitlines()[-1] if "\nOriginal Traceback" in text else text) or type(error).__name__


def _redirect(log: Path) -> None:
    """Everything that this process prints, C++ included, goes to its own log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]  # a text stream unless someone replaced it


def _plain_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"warning: {message}\n"


if __name__ == "__main__":
    leave(main(AttemptDir(Path(sys.argv[1]))))
