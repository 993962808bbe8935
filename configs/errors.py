"""Exit codes of `python -m launch`, and the errors that carry them.

Each message names the thing, the value, the place and the fix.
"""

EXIT_DONE = 0
EXIT_TRAINING = 1
EXIT_CONFIG = 2
EXIT_ENVIRONMENT = 3
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130


def first_line(error: BaseException) -> str:
    """What it says, without what follows (a stack of C++, a list of arguments), for a sentence of ours."""
    return "".join(str(error).strip().splitlines()[:1]).rstrip(".")


class LockstepError(Exception):
    """Base of all errors that are told to the user as one sentence, without a traceback."""

    exit_code = EXIT_TRAINING
    kind = "training error"


class TrainingError(LockstepError):
    """Training itself went wrong: a loss that is not finite, a result outside what was expected."""


class ConfigError(LockstepError):
    """Something the user chose cannot be done; `problems` holds one line for each."""

    exit_code = EXIT_CONFIG
    kind = "config error"

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class CheckpointError(LockstepError):
    """A checkpoint does not fit the run that wants to load it, or no valid one is left."""

    exit_code = EXIT_CONFIG
    kind = "checkpoint error"


class EnvironmentProblem(LockstepError):
    """The machine cannot do it: no GPU, no disk space, no port, no data."""

    exit_code = EXIT_ENVIRONMENT
    kind = "environment error"
