"""The other ranks of this node: whether one of them is gone, for which torchrun ends the rest. No torch."""

import os

from configs.contract import Outcome
from configs.errors import LockstepError
from configs.run_dir import AttemptDir


class PeerError(LockstepError):
    """Another rank failed; what happened is told by that rank."""

    kind = "peer"


def failed_peer(attempt: AttemptDir, rank: int) -> int | None:
    """A rank of this node, other than `rank`, that failed or ended without a word; None if there is none."""
    for path in sorted(attempt.path.glob("pid-rank*")):
        other = int(path.name.removeprefix("pid-rank"))
        # Life first, outcome second: a rank writes its outcome before it ends.
        alive = other == rank or _is_alive(int(path.read_text(encoding="utf-8")))
        outcome = None if other == rank else Outcome.load(attempt.outcome(other))
        if (outcome is None and not alive) or (outcome is not None and outcome.status == "failed"):
            return other
    return None


def _is_alive(pid: int) -> bool:
    """Whether there is such a process; torchrun collects a rank that has ended before it ends the others."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
