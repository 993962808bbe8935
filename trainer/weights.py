"""Weights that a run begins with: read from a file, fitted to the network, taken over in one go."""

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from configs.derive import counted
from configs.errors import CheckpointError, ConfigError, EnvironmentProblem, first_line
from configs.known_models import NO_WEIGHTS
from configs.schema import RunConfig
from trainer.checkpoint import check_fits
from trainer.published import find_published

Tensors = dict[str, Tensor]

PICKLED = (".pth", ".pt", ".bin", ".tar")
_ENTRIES = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")
"""Where training programs keep the weights in a checkpoint (timm, torchvision, Lightning); averages before the rest."""
_WRAPPERS = ("_orig_mod.", "module.")
_AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")
"""Heads of GoogLeNet and Inception that only training with them needs."""
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])(?=\.)")


def take_weights(model: nn.Module, config: RunConfig, num_classes: int, channels: int) -> list[str]:
    """Load what `init_from` or `model.weights` names into `model`. Returns the lines that say what was taken.

    `init_from` must fit in full. With `model.weights` a head for another number of classes begins anew, with what the
    seed gave it, and the first convolution is adapted to `channels`. Raises ConfigError, CheckpointError and, where
    published weights are not in the cache, EnvironmentProblem.
    """
    if config.init_from is not None:
        found, path = read_weights(config.init_from, "init_from")
        check_fits(shapes_of(model.state_dict()), shapes_of(found), path)
        copy_into(model, found)
        return [f"weights    {path}: all {counted(len(found), 'tensor')}"]
    if config.model.weights == NO_WEIGHTS:
        return []
    found, label, path = _named_by(config)
    fit = fit_weights(model, found, num_classes, channels, path)
    copy_into(model, fit.tensors)
    return [f"weights    {label}: {fit.describe(model, config.seed)}"]


@torch.no_grad()
def copy_into(model: nn.Module, tensors: Tensors) -> None:
    """Without load_state_dict, which for some networks (MNASNet) wants to know more than the tensors."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.copy_(tensors[name])


def _named_by(config: RunConfig) -> tuple[Tensors, str, Path]:
    """The tensors that `model.weights` names, what to call them, and their file."""
    published = find_published(config.model)
    if published is None:
        found, path = read_weights(config.model.weights, "model.weights")
        return found, str(path), path
    place = published.locate()
    if place is None:
        raise EnvironmentProblem(
            f"model.weights: {published.label} for {published.name} is not in the cache, where `python -m launch` puts "
            "it before the ranks start; start with that, or give a path"
        )
    try:
        source = published.build(place)
    except Exception as error:  # what is in the file may be anything
        text = first_line(error)
        if config.model.args and isinstance(error, TypeError | ValueError | AssertionError):
            raise ConfigError(f"model.args do not go with model.weights: {config.model.weights}: {text}") from error
        raise CheckpointError(f"{place} is not the weights of {published.name}: {text}; remove it") from error
    return dict(source.state_dict()), f"{published.label}, {place}", place


def read_weights(source: str, key: str) -> tuple[Tensors, Path]:
    """All tensors of a .safetensors file, of a .pth file that torch.save wrote, or of a run folder, by name; `key` is
    the setting that named it. Nothing that is read can run code."""
    path = Path(source) / "model.safetensors" if Path(source).is_dir() else Path(source)
    if not path.is_file():
        raise ConfigError(f"{key}: {path} does not exist")
    if path.suffix in PICKLED:
        return _read_pickled(path, key), path
    try:
        return load_file(path), path
    except Exception as error:
        raise CheckpointError(
            f"{key}: {path} is not a safetensors file: {error}; give a model.safetensors or a run folder"
        ) from error


def _read_pickled(path: Path, key: str) -> Tensors:
    try:
        # Many programs save their command line beside the weights; as a class that only holds values it is harmless.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{key}: {path} cannot be read as tensors alone: {type(error).__name__}: {first_line(error)}; save "
            "the network's state_dict() by torch.save, or as .safetensors"
        ) from error
    entries = [name for name in _ENTRIES if isinstance(content, dict) and isinstance(content.get(name), dict)]
    found = content[entries[0]] if entries else content
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{key}: {path} holds no state_dict; save the network's state_dict() by torch.save")
    return {_plain(name): tensor for name, tensor in found.items() if name != "n_averaged"}


def _plain(name: str) -> str:
    """Without what DDP, torch.compile and averages put before a name."""
    while prefix := next((wrapper for wrapper in _WRAPPERS if name.startswith(wrapper)), ""):
        name = name.removeprefix(prefix)
    return name


@dataclass(frozen=True)
class Fit:
    """Weights in the shapes of a network."""

    tensors: Tensors
    """All of its state."""
    new: list[str]
    """Parameters of the head, which stay as the seed made them."""
    old_classes: int | None
    """Of the head that is not taken; None where there is none."""
    adapted: str | None
    """What was done to the first convolution."""

    def describe(self, model: nn.Module, seed: int) -> str:
        taken = f"{len(self.tensors) - len(self.new)} of {counted(len(self.tensors), 'tensor')}"
        if self.adapted is not None:
            taken += f"; {self.adapted}"
        if not self.new:
            return taken
        classes = model.state_dict()[self.new[0]].shape[0]
        before = "it has no head" if self.old_classes is None else f"it has {self.old_classes:,}"
        return f"{taken}; new, from seed {seed}: {', '.join(self.new)} ({classes:,} classes, {before})"


def fit_weights(model: nn.Module, found: Tensors, num_classes: int, channels: int, path: Path) -> Fit:
    """`found` for `model`, which was built for `num_classes` and `channels`. Raises CheckpointError naming what does
    not fit though it is neither the head nor the first convolution."""
    wanted = dict(model.state_dict())
    found = {_new_name(name, wanted): tensor for name, tensor in found.items()}
    found = {name: tensor for name, tensor in found.items() if name in wanted or not name.startswith(_AUXILIARY)}
    # What it counts is only of use without a momentum, and files of before 2019 lack it.
    counters = {name for name in wanted if name.endswith("num_batches_tracked")} - found.keys()
    new, old_classes = _new_head(model, wanted, found, num_classes)
    found, adapted = _adapt_first(wanted, found, channels)
    kept = {name: wanted[name] for name in (*counters, *new)}
    check_fits(shapes_of(wanted), shapes_of(found | kept), path)
    return Fit(found | kept, new, old_classes, adapted)


def _new_name(name: str, wanted: Tensors) -> str:
    """What a tensor of torchvision's published DenseNets, whose files have the names of 2017, is called today."""
    today = _OLD_DENSENET.sub(r"\1\2", name)
    return today if name not in wanted and today in wanted else name


def _new_head(model: nn.Module, wanted: Tensors, found: Tensors, num_classes: int) -> tuple[list[str], int | None]:
    """Names of the tensors whose first dimension is the classes and differs, all in the same way; or, where the file
    has no head at all, of the last layer. And how many classes the file has."""
    differs = [name for name in wanted if name in found and wanted[name].shape != found[name].shape]
    heads = [name for name in differs if _is_of_classes(wanted[name], found[name], num_classes)]
    classes = {found[name].shape[0] for name in heads}
    if len(classes) == 1:
        return heads, classes.pop()
    head = _last_layer(model, num_classes)
    return (head, None) if head and not any(name in found for name in head) else ([], None)


def _is_of_classes(wanted: Tensor, found: Tensor, num_classes: int) -> bool:
    return (
        wanted.ndim == found.ndim > 0
        and wanted.shape[0] == num_classes != found.shape[0]
        and wanted.shape[1:] == found.shape[1:]
    )


def _last_layer(model: nn.Module, num_classes: int) -> list[str]:
    """Names of the parameters of the last layer, if its outputs are the classes."""
    layers = [(name, dict(module.named_parameters(recurse=False))) for name, module in model.named_modules()]
    name, parameters = [(name, parameters) for name, parameters in layers if parameters][-1]
    if any(parameter.ndim == 0 or parameter.shape[0] != num_classes for parameter in parameters.values()):
        return []
    return [f"{name}.{own}" if name else own for own in parameters]


def _adapt_first(wanted: Tensors, found: Tensors, channels: int) -> tuple[Tensors, str | None]:
    """`found` with the first convolution for `channels`, and what was done, if it was made for another number."""
    name = next((name for name, tensor in wanted.items() if tensor.ndim == 4), None)
    if name is None or name not in found or found[name].ndim != 4 or wanted[name].shape[1] != channels:
        return found, None
    before, after = list(found[name].shape), list(wanted[name].shape)
    if before[1] == channels or before[:1] + before[2:] != after[:1] + after[2:]:
        return found, None
    how = "summed to 1" if channels == 1 else f"repeated and scaled to {channels}"
    return found | {name: adapted_channels(found[name], channels)}, f"{name}: {before[1]} channels {how}"


def adapted_channels(weight: Tensor, channels: int) -> Tensor:
    """A convolution's `weight` (out, in, height, width) for `channels` inputs, as timm does it: the sum for one, which
    answers a grey image as it would answer the same grey in all channels; else repeated in turn, and scaled to keep
    the size of the sum."""
    before = weight.shape[1]
    if channels == before:
        return weight
    if channels == 1:
        return weight.float().sum(1, keepdim=True).to(weight.dtype)
    return weight.repeat(1, math.ceil(channels / before), 1, 1)[:, :channels] * (before / channels)


def shapes_of(tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
