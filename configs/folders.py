"""Where the splits of a folder of images lie. No torch: the launcher asks too, before anything starts."""

from pathlib import Path
from typing import Any

from configs.data_section import DataConfig
from configs.errors import ConfigError
from configs.known_data import ENCODED, IMAGE_FOLDER, KNOWN_DATA, WEBDATASET
from configs.schema import RunConfig

TRAIN, VAL = "train", "val"
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")


def with_folder(config: RunConfig, folder: Path) -> RunConfig:
    """`config` with the data of `folder`, whose images are made as those that its network knows.

    Raises ConfigError where nothing says how.
    """
    data, known = config.data, KNOWN_DATA.get(config.data.name)
    changes: dict[str, Any] = {
        "root": str(folder),
        "val_fraction": None,
        "residency": "auto",
        "sampling": "shuffled",
        "sampling_weights": None,
    }
    if known is not None:
        channels, side, _ = known.shape
        changes |= {"channels": channels, "image_size": side, "resize_size": side, "augment": {}}
        changes |= {"name": IMAGE_FOLDER, "mean": data.mean or known.mean, "std": data.std or known.std}
    elif data.name in ENCODED:
        changes |= {"name": IMAGE_FOLDER, "huggingface": {}}
    else:
        raise ConfigError(
            f"--data: the run's data are {data.name}, and nothing says how its images are made of files; say it by "
            "data.name=imagefolder with data.image_size, data.channels and data.residency=stream"
        )
    return config.model_copy(update={"data": DataConfig.model_validate(data.model_dump() | changes)})


def find_splits(config: DataConfig, cwd: Path | None = None) -> tuple[Path, Path | None]:
    """The folders of classes for training and for evaluation; None where the first is to be split.

    Raises ConfigError where data.root holds no such folders, or more than data.val_fraction lets it.
    """
    root = (cwd or Path.cwd()) / config.root
    content = "a folder of images for each class" if config.name == IMAGE_FOLDER else "tar files"
    train, val = root / TRAIN, root / VAL
    if not root.is_dir():
        raise ConfigError(f"data.root: there is no folder {root}; give the one that holds {TRAIN}/ and {VAL}/")
    if config.val_fraction is not None:
        if train.is_dir() and val.is_dir():
            raise ConfigError(
                f"data.val_fraction is {config.val_fraction} and {root} has {TRAIN}/ and {VAL}/ already; "
                f"leave it out, or split the one by data.root={train}"
            )
        _check_tars(config, root)
        return root, None
    if missing := [f"{folder.name}/" for folder in (train, val) if not folder.is_dir()]:
        raise ConfigError(
            f"data.root: {root} has no {' and no '.join(missing)}; make it, with {content}, or set "
            "data.val_fraction to split what is in one place"
        )
    for folder in (train, val):
        _check_tars(config, folder)
    return train, val


def _check_tars(config: DataConfig, folder: Path) -> None:
    if config.name != WEBDATASET:
        return
    names = sorted(path.name for path in folder.iterdir())
    if packed := [name for name in names if name.endswith(_COMPRESSED)]:
        raise ConfigError(
            f"data.root: {folder / packed[0]} is compressed, so no sample in it can be read without those before it; "
            "unpack it to a .tar"
        )
    if not any(name.endswith(".tar") for name in names):
        raise ConfigError(f"data.root: {folder} has no .tar file; wanted are shards in WebDataset's layout")
