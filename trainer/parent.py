"""No process outlives the one that started it. No torch: the worker calls this before anything slow."""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel SIGKILL this process when its parent ends; where it cannot, ask for the parent twice a second.

    `parent` is its process id, from who knew it before this process began: it may have ended since.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)
        return
    threading.Thread(target=_poll, args=(parent,), daemon=True).start()


def _poll(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
