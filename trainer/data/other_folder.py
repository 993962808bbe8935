"""A folder of images that is not the run's: its classes are matched by name with those that the run knows."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from configs.errors import ConfigError
from trainer.data.folder import Files, files_of, left_out, scan, some


def load_only(
    folder: Path, classes: Sequence[str], alive: Callable[[], None] = lambda: None
) -> tuple[Files, list[str]]:
    """The images of `folder`, whose class folders are numbered as in `classes`, and lines for the console. No folder's
    name has a slash: one in a class's name is an underscore.

    Raises ConfigError where it holds none, another class, or one whose name several classes have.
    """
    found = scan(folder, alive)
    order = [os.fsencode(name.replace("/", "_")) for name in classes]
    if strangers := [os.fsdecode(name) for name in sorted(found.entries.keys() - set(order))]:
        theirs, ours = (some([repr(name) for name in names]) for names in (strangers, classes))
        raise ConfigError(
            f"--data: {folder} has {theirs}, which the run does not know as a class; it knows {ours}; rename or take "
            "away the folder"
        )
    if not found.entries:
        raise ConfigError(f"--data: {folder} has no folder of images; wanted is one for each class, by its name")
    if shared := [name for name, number in Counter(order).items() if number > 1 and name in found.entries]:
        raise ConfigError(
            f"--data: several classes of the run are named {some([repr(os.fsdecode(name)) for name in shared])}, so "
            "nothing says which the folder is; take it away"
        )
    notes = left_out(folder, found)
    if missing := [name for name, raw in zip(classes, order, strict=True) if raw not in found.entries]:
        notes.append(f"note: {len(missing)} of {len(classes)} classes have no image here: {some(missing)}")
    return files_of(folder, found.entries, order), notes
