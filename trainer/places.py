"""Where an error came from, for its one sentence."""

import os
import sysconfig
import traceback


def place_of(error: BaseException) -> str | None:
    """file:line of the innermost frame that is not in an installed package; of the innermost one if all are."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = ("site-packages", sysconfig.get_path("stdlib"))
    ours = [f for f in frames if not f.filename.startswith("<") and not any(place in f.filename for place in installed)]
    chosen = (ours or list(frames))[-1:]
    return f"{os.path.relpath(chosen[0].filename)}:{chosen[0].lineno}" if chosen else None
