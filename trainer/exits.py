"""How a process of ours ends. No torch: its helpers begin before it is needed."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from configs.errors import EnvironmentProblem, LockstepError


def told(body: Callable[[], int]) -> int:
    """The exit code of `body`; what the user should know of an error is printed, in one line."""
    try:
        return body()
    except LockstepError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{EnvironmentProblem.kind}: {error}", file=sys.stderr)
        return EnvironmentProblem.exit_code


def leave(code: int) -> NoReturn:
    """End this process. Interpreter shutdown with torch loaded takes up to a second, when everything is written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
