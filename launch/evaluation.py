"""What `eval` evaluates: a run's settings with changes, on its own images or on a folder of other ones."""

import dataclasses
import json
from pathlib import Path

from configs.errors import ConfigError
from configs.folders import with_folder
from configs.loader import LoadedConfig, differences, load_config
from configs.run_dir import RunDir
from launch.options import Options


def load_for_evaluation(run: RunDir, options: Options, data: Path | None) -> tuple[LoadedConfig, list[str]]:
    """The settings to evaluate with, and those of them that are not the run's own, such as
    `data.image_size: 224 -> 288`. Raises ConfigError."""
    loaded = load_config(run.config, options.overrides)
    changed = differences(load_config(run.config).config, loaded.config)
    if data is None:
        return loaded, changed
    folder = options.cwd / data
    if not folder.is_dir():
        raise ConfigError(f"--data: there is no folder {folder}; give the one that holds a folder for each class")
    config = with_folder(loaded.config, folder)
    _check_names(run)
    return dataclasses.replace(loaded, config=config), changed


def _check_names(run: RunDir) -> None:
    try:
        names = json.loads(run.classes.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"--data: run {run.name!r} has no class names ({run.classes} is missing) to match folders by; its data set "
            "has no `classes`"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"--data: {run.classes} cannot be read: {error}; put back what the run wrote") from error
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"--data: {run.classes} is no list of class names; put back what the run wrote")
