"""The network of a run: built, with the weights it begins with, frozen where it is to be, where it is to be trained."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from configs.augment_section import AugmentConfig
from configs.derive import counted
from configs.image_sizes import evaluation_view
from configs.schema import RunConfig
from trainer import checkpoint
from trainer.choices import choose_channels_last
from trainer.data.augment import Preprocess
from trainer.data.datasets import Data
from trainer.data.images import ImageSplit
from trainer.data.stream import KeyedSamples
from trainer.data.workers import Request
from trainer.freeze import freeze, in_evaluation
from trainer.models import build_model
from trainer.other_sizes import check_sizes
from trainer.published import find_published
from trainer.runtime import RunContext, check_sync_batchnorm
from trainer.tensors import convert
from trainer.weights import take_weights


@dataclass(frozen=True)
class Network:
    """What is trained, and what was decided about it."""

    model: nn.Module
    channels_last: bool
    """The memory format of images and weights."""
    why_layout: str
    frozen_norms: list[nn.Module]
    """BatchNorm layers that stay in evaluation mode."""
    lines: list[str]
    """For the plan screen."""


def build_network(
    config: RunConfig,
    context: RunContext,
    data: Data,
    shape: tuple[int, int, int],
    checkpoints: Path,
    *,
    trains: bool,
) -> Network:
    """Weights are taken from elsewhere only where there is no checkpoint to go on from."""
    model = build_model(config.model, data.num_classes, shape, config.seed, context.dtype)
    if trains:
        check_sizes(model, config.data, shape, context.dtype)
    if config.sync_batchnorm and context.world_size > 1 and trains:
        check_sync_batchnorm(config, len(data.train), context)
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    lines = []
    if not checkpoint.step_folders(checkpoints):
        if trains and hasattr(model, "begin_with"):
            lines.append(begin_with_images(model, data, context.dtype))
        lines += take_weights(model, config, data.num_classes, shape[0])
        lines += other_view(config, data) if trains else []
    norms, frozen = freeze(model, config.model)
    in_evaluation(norms)
    channels_last, why = choose_channels_last(config, model, context.precision)
    if channels_last:
        convert(model, memory_format=torch.channels_last)
    return Network(convert(model, device=context.device), channels_last, why, norms, [*lines, *frozen])


FIRST_IMAGES = 5000
"""Training images that a network may look at before it begins."""


def begin_with_images(model: nn.Module, data: Data, dtype: torch.dtype) -> str:
    """Let a network initialise itself by the first training images, normalised, those of a folder not augmented: its
    method `begin_with(batches)` of (N, C, H, W). Returns the line that says so."""
    split = data.train.unaugmented() if isinstance(data.train, ImageSplit) else data.train
    samples, count = KeyedSamples(split, 0, data.num_classes), min(FIRST_IMAGES, len(split))
    preprocess = Preprocess(AugmentConfig(), 0, data.mean, data.std, dtype, torch.device("cpu"))
    requests = (Request(0, list(range(first, min(first + 100, count)))) for first in range(0, count, 100))
    batches = (preprocess.normalise(samples.read(request)[0]) for request in requests)
    model.begin_with(batches)  # type: ignore[operator]  # the caller has asked for it
    return f"weights    begin with the first {counted(count, 'training image')}"


def normalised_for(config: RunConfig, data: Data, channels: int) -> Data:
    """`data` with the mean and std that published weights were trained on, where the settings give none; for another
    number of channels than theirs, the mean of them for grey, else in turn."""
    published = None if config.data.mean is not None else find_published(config.model)
    if published is None:
        return data
    mean, std = (_for_channels(values, channels) for values in (published.mean, published.std))
    numbers = (" ".join(f"{value:.4g}" for value in values) for values in (mean, std))
    line = "normalise  mean {}, std {}: those of the weights".format(*numbers)
    return dataclasses.replace(data, mean=mean, std=std, notes=(*data.notes, line))


def other_view(config: RunConfig, data: Data) -> list[str]:
    """A line that says where evaluation sees images otherwise than the accuracy of published weights was measured."""
    published, view = find_published(config.model), evaluation_view(config.data)
    if published is None or view is None or view == published.view or not isinstance(data.train, ImageSplit):
        return []
    seen, theirs = ("{} pixels, the middle {} of them, {}".format(*each) for each in (view, published.view))
    return [f"view       evaluation resizes to {seen}; the weights were measured at {theirs}"]


def _for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if channels == 1:
        return (sum(values) / len(values),)
    return tuple(values[channel % len(values)] for channel in range(channels))
