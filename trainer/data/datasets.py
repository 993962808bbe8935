"""Names to data sets: the built-in ones as uint8 tensors, a user's `module:callable` as it is."""

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from configs.data_section import DataConfig
from configs.errors import ConfigError, EnvironmentProblem, first_line
from configs.known_data import ENCODED, IDX_FILES, KNOWN_DATA, KnownData
from trainer.data import jpeg
from trainer.data.bad_images import BadImages
from trainer.data.idx import read_idx
from trainer.data.images import EVALUATION, TRAINING, ImageSplit
from trainer.data.other_folder import load_only
from trainer.data.splits import load_splits


class MapStyle(Protocol):
    """A map-style data set: item i is (image, label)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Any, Any]: ...


@dataclass(frozen=True)
class TensorSplit:
    """A split that is already one array: `images` uint8 (N, C, H, W), `labels` int64 (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    @property
    def num_bytes(self) -> int:
        return self.images.nbytes + self.labels.nbytes


@dataclass(frozen=True)
class Data:
    """Both splits and what the rest needs to know of them."""

    train: MapStyle
    evaluation: MapStyle
    num_classes: int
    classes: tuple[str, ...] | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    files: dict[str, str] | None = None
    """Fingerprint of each split's images, where they are encoded."""
    notes: tuple[str, ...] = ()
    """Lines for the console."""


def load_data(
    config: DataConfig, bad_images: Path = Path("bad_images.txt"), alive: Callable[[], None] = lambda: None
) -> Data:
    """Read both splits. Nothing is downloaded here: prepare.py did, before any rank started.

    `bad_images` is where images that cannot be decoded are listed; `alive` is called while a folder is looked through.
    """
    if config.name in ENCODED:
        return _load_encoded(config, bad_images, alive)
    known = KNOWN_DATA.get(config.name)
    data = _load_own(config) if known is None else _load_both(known, config)
    for split in (data.train, data.evaluation):
        if isinstance(split, TensorSplit):  # nothing looks at the labels later, sample by sample
            known_labels(split, data.num_classes, config.name)
    return data


def _load_both(known: KnownData, config: DataConfig) -> Data:
    train, classes = _load_known(known, config, train=True)
    evaluation, _ = _load_known(known, config, train=False)
    return Data(train, evaluation, known.num_classes, classes, config.mean or known.mean, config.std or known.std)


def _load_own(config: DataConfig) -> Data:
    build = load_callable(config.name, "data.name")
    train, evaluation = build(True), build(False)
    for split, data in (("train", train), ("eval", evaluation)):
        if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
            raise ConfigError(
                f"data.name: {config.name} gave a {type(data).__name__} for {split}; wanted is a map-style data set"
            )
        if len(data) == 0:
            raise ConfigError(f"data.name: {config.name} gave an empty {split} split: 0 samples")
    classes = _class_names(train)
    num_classes = config.num_classes or (len(classes) if classes else None)
    if num_classes is None:
        raise ConfigError(f"data.num_classes is not set and {config.name} has no `classes`; set data.num_classes")
    if classes and len(classes) != num_classes:
        raise ConfigError(f"data.num_classes is {num_classes} but {config.name} has {len(classes)} classes")
    return Data(train, evaluation, num_classes, classes, config.mean, config.std)


def load_elsewhere(
    config: DataConfig, folder: Path, classes: Path, bad_images: Path, alive: Callable[[], None] = lambda: None
) -> Data:
    """`folder` in place of the evaluation split; nothing is to be trained. `classes` is the run's list of names, which
    the launcher has checked; the others as load_data() has them."""
    names = tuple(json.loads(classes.read_text(encoding="utf-8")))
    files, notes = load_only(folder, names, alive)
    bad = BadImages(bad_images, config.max_bad_images) if config.on_bad_image == "skip" else None
    split = ImageSplit(files, EVALUATION, config, bad)
    files_seen = {"eval": files.fingerprint}
    return Data(split, split, len(names), names, config.mean, config.std, files_seen, (*notes, jpeg.describe()))


def _load_encoded(config: DataConfig, bad_images: Path, alive: Callable[[], None]) -> Data:
    splits = load_splits(config, alive)
    num_classes = len(splits.classes)
    if config.num_classes not in (None, num_classes):
        raise ConfigError(f"data.num_classes is {config.num_classes} but {config.root} has {num_classes} classes")
    bad = BadImages(bad_images, config.max_bad_images) if config.on_bad_image == "skip" else None
    return Data(
        ImageSplit(splits.train, TRAINING, config, bad),
        ImageSplit(splits.evaluation, EVALUATION, config, bad),
        num_classes,
        splits.classes,
        config.mean,
        config.std,
        {"train": splits.train.fingerprint, "eval": splits.evaluation.fingerprint},
        (*splits.notes, jpeg.describe()),
    )


def known_labels(split: MapStyle, num_classes: int, name: str) -> Tensor | None:
    """The classes of all samples, int64 (N,), where they are known without reading any; a user's data set, `name`, may
    have them as `targets`, as torchvision's do. Raises ConfigError where these are not a class for each sample."""
    if isinstance(split, ImageSplit):
        return torch.as_tensor(split.files.labels, dtype=torch.int64)
    found = split.labels if isinstance(split, TensorSplit) else getattr(split, "targets", None)
    return None if found is None else _as_classes(found, len(split), num_classes, name)


def _as_classes(found: Any, num_samples: int, num_classes: int, name: str) -> Tensor:
    wanted = f"wanted is a class for each of the {num_samples:,} samples, an integer from 0 to {num_classes - 1}"
    try:
        labels = torch.as_tensor(found)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"data.name: the labels of {name} are no tensor of integers ({error}); {wanted}") from error
    if labels.shape != (num_samples,) or labels.is_floating_point() or labels.is_complex():
        what = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise ConfigError(f"data.name: the labels of {name} are {what}; {wanted}")
    strange = ((labels < 0) | (labels >= num_classes)).nonzero()
    if len(strange):
        index = int(strange[0])
        raise ConfigError(f"data.name: sample {index} of {name} has the label {int(labels[index])}; {wanted}")
    return labels.long()


def _class_names(split: Any) -> tuple[str, ...] | None:
    names = getattr(split, "classes", None)
    return None if names is None else tuple(str(name) for name in names)


def _load_known(known: KnownData, config: DataConfig, *, train: bool) -> tuple[TensorSplit, tuple[str, ...] | None]:
    place = Path(config.root).resolve() / known.folder
    read = _read_arrays if known.files == IDX_FILES else _read_pickles
    try:
        return read(known, config.root, train=train)
    except EnvironmentProblem:
        raise
    except Exception as error:  # files that are not there, or not what they are to be
        raise EnvironmentProblem(
            f"{config.name} is not in {place}, or not as it was published: {first_line(error)}; remove the folder "
            "to have it anew"
        ) from error


def _read_arrays(known: KnownData, root: str, *, train: bool) -> tuple[TensorSplit, tuple[str, ...] | None]:
    images, labels = (read_idx(Path(root) / known.folder / name) for name in IDX_FILES[0 if train else 2 :][:2])
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(f"images of shape {tuple(images.shape)} and labels of shape {tuple(labels.shape)}")
    return TensorSplit(images.unsqueeze(1), labels.long()), known.classes


def _read_pickles(known: KnownData, root: str, *, train: bool) -> tuple[TensorSplit, tuple[str, ...] | None]:
    from torchvision import datasets  # takes 2 s to import

    source = getattr(datasets, known.torchvision_name)
    _check_hashes(source, Path(root).resolve() / known.folder, train=train)
    data = source(root, train=train, download=False)
    images = torch.as_tensor(data.data).permute(0, 3, 1, 2).contiguous()
    return TensorSplit(images, torch.as_tensor(data.targets, dtype=torch.int64)), _class_names(data)


def _check_hashes(source: Any, place: Path, *, train: bool) -> None:
    """CIFAR's files are pickles, which could run code: none is opened that is not, byte for byte, the published one.

    torchvision looks at the hashes too; here they stand guard whatever its version does.
    """
    published = list(getattr(source, "train_list" if train else "test_list", ()))
    if meta := getattr(source, "meta", None):
        published.append((meta["filename"], meta["md5"]))
    for name, md5 in published:
        if not (place / name).is_file():
            continue  # torchvision says so
        found = hashlib.md5((place / name).read_bytes(), usedforsecurity=False).hexdigest()
        if found != md5:
            raise EnvironmentProblem(
                f"{place / name} is not the published file: MD5 {found}, expected {md5}; remove {place} to have it anew"
            )


def load_callable(name: str, key: str) -> Any:
    """`module:callable` to the object. Raises ConfigError naming `key` if it cannot be found."""
    module_name, separator, attribute = name.partition(":")
    if not separator:
        known = ", ".join([*KNOWN_DATA, *ENCODED]) if key == "data.name" else "see the documentation"
        raise ConfigError(f"{key}: {name!r} is neither a known name ({known}) nor module:callable")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ConfigError(f"{key}: there is no module {module_name!r} on {sys.path[:2]}") from error
    except AttributeError as error:
        raise ConfigError(f"{key}: module {module_name!r} has no {attribute!r}") from error
    if not callable(found):
        raise ConfigError(f"{key}: {name} is a {type(found).__name__}, not callable")
    return found


def as_image_tensor(image: Any) -> Tensor:
    """A data set's image as a (C, H, W) tensor: uint8 from PIL and from uint8 arrays
    (H, W) or (H, W, C), others unchanged."""
    if isinstance(image, Tensor):
        return image if image.ndim == 3 else image.unsqueeze(0)
    array = torch.as_tensor(np.array(image) if hasattr(image, "getbands") else image)
    return array.unsqueeze(0) if array.ndim == 2 else array.permute(2, 0, 1).contiguous()
