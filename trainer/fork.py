"""Start the ranks of one node by fork: `python -m trainer.fork ATTEMPT_DIR`. What they import is imported once, here;
see docs/decisions/0011-ranks-by-fork.md.

This process runs no operator, opens no socket and asks no GPU: threads and drivers do not survive a fork.
"""

import gc
import importlib
import os
import signal
import sys
from pathlib import Path

from configs.contract import WorkerPlan
from configs.run_dir import AttemptDir
from trainer.__main__ import main
from trainer.exits import leave
from trainer.parent import die_with_parent

IMPORTS = ("trainer.run", "torch._dynamo")
"""Of a rank, before its first step. DDP's constructor takes 2 s for the second."""


def start_ranks(attempt: AttemptDir) -> int:
    """Fork the ranks and stay until all have ended. Returns 0 if all did well, else 1, as torchrun does."""
    gc.disable()  # as the ranks do while they import
    die_with_parent()
    plan = WorkerPlan.load(attempt.plan)
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()  # so that no collection of a rank writes to memory that all share
    ranks = {_fork(attempt, rank, plan.local_world_size): rank for rank in range(plan.local_world_size)}
    return _wait(ranks)


def _fork(attempt: AttemptDir, rank: int, world_size: int) -> int:
    """Returns the process id of the new rank."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in own.items()})
        leave(main(attempt))
    return pid


def _wait(ranks: dict[int, int]) -> int:
    """Once one has failed the others are asked to end, since they can agree on nothing any more; who does not hear it,
    the launcher ends. Prints the exit codes as torchrun does, for the launcher to read."""
    failed = False
    while ranks:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        print(f"rank {ranks.pop(pid)}: exitcode: {code} (pid: {pid})", flush=True)
        if code != 0 and not failed:
            failed = True
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return int(failed)


if __name__ == "__main__":
    leave(start_ranks(AttemptDir(Path(sys.argv[1]))))
