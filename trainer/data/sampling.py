"""How often each sample is drawn, `data.sampling`: a pure function of (seed, epoch, place in the epoch)."""

from pathlib import Path

import torch
from torch import Tensor

from configs.data_section import DataConfig
from configs.errors import ConfigError
from trainer.data.datasets import MapStyle, known_labels
from trainer.data.order import hash_of, key_of
from trainer.data.streams import Stream


def sampling_weights(config: DataConfig, split: MapStyle, num_classes: int) -> Tensor | None:
    """How often each sample of the training split is drawn, relative to the others: float64 (N,), on the CPU; None
    where each is drawn once an epoch.

    `balanced`: every class equally often, whatever its samples are. `weighted`: by data.sampling_weights, a number for
    each class, or a file with a number for each sample. Raises ConfigError for weights that do not fit.
    """
    if config.sampling == "shuffled":
        return None
    if isinstance(config.sampling_weights, str):
        return _from_file(Path(config.sampling_weights), len(split))
    labels = known_labels(split, num_classes, config.name)
    if labels is None:
        raise ConfigError(
            f"data.sampling: {config.sampling} needs the class of each sample, and {config.name} has no `targets`; use "
            "weighted, with a file in data.sampling_weights"
        )
    counts = torch.bincount(labels, minlength=num_classes).double()
    if config.sampling == "balanced":
        return (1 / counts)[labels]
    assert config.sampling_weights is not None
    if len(config.sampling_weights) != num_classes:
        raise ConfigError(f"data.sampling_weights has {len(config.sampling_weights)} numbers for {num_classes} classes")
    return _checked(torch.tensor(config.sampling_weights, dtype=torch.float64)[labels], "data.sampling_weights")


def _from_file(path: Path, num_samples: int) -> Tensor:
    try:
        values = [float(line) for line in path.read_text(encoding="ascii").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.sampling_weights: {path}: {error}; give a text file with a number a line") from error
    if len(values) != num_samples:
        raise ConfigError(f"data.sampling_weights: {path} has {len(values):,} numbers for {num_samples:,} samples")
    return _checked(torch.tensor(values, dtype=torch.float64), str(path))


def _checked(weights: Tensor, place: str) -> Tensor:
    if not bool((weights.isfinite() & (weights >= 0)).all()) or not bool(weights.any()):
        raise ConfigError(f"{place}: weights are finite numbers from 0 on, and not all 0")
    return weights


def draw(weights: Tensor, seed: int, epoch: int) -> Tensor:
    """As many samples as there are weights, drawn by them with replacement: int64 (N,).

    By the inverse of the cumulative weights, in float64 on the CPU, so that it is the same on every device.
    """
    places = torch.arange(len(weights))
    shares = (hash_of(key_of(seed, epoch, Stream.SAMPLING), places) >> 11 & (1 << 53) - 1).double() * 2.0**-53
    limits = weights.cumsum(0)
    found = torch.searchsorted(limits, shares * limits[-1], right=True)
    return found.clamp(max=int(weights.nonzero()[-1]))  # a sum that was rounded up leaves room behind the last one
