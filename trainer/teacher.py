"""Distillation: a finished run's network says how likely each class is, and training follows that too.

Hinton, Vinyals, Dean 2015, https://arxiv.org/abs/1503.02531.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError, first_line
from configs.known_data import KNOWN_DATA
from configs.loss_section import LossConfig
from configs.run_dir import RunDir
from configs.schema import RunConfig
from trainer.checkpoint import check_fits
from trainer.data.folder import some
from trainer.disk import sha256
from trainer.models import build_model
from trainer.network import normalised_for
from trainer.runtime import RunContext
from trainer.weights import copy_into, read_weights, shapes_of

if TYPE_CHECKING:
    from trainer.data.datasets import Data


@dataclass(frozen=True)
class Teacher:
    """A network in evaluation mode that learns nothing."""

    model: nn.Module
    config: LossConfig
    context: RunContext
    scale: Tensor
    shift: Tensor
    """From the student's normalised pixels to the teacher's, (channels or 1, 1, 1)."""
    sha256: str
    """Of the file of its weights."""
    line: str
    """For the plan screen."""

    def blend(self, loss: Tensor, logits: Tensor, images: Tensor) -> Tensor:
        """`loss`, summed over the samples, with teacher_weight of it replaced by the divergence of the student's
        classes from the teacher's on the same images (N, C, H, W), both at teacher_temperature."""
        weight, temperature = self.config.teacher_weight, self.config.teacher_temperature
        with torch.no_grad(), self.context.autocast():
            answers = self.model(images * self.scale + self.shift)
        taught = F.log_softmax(answers.to(logits.dtype) / temperature, dim=1)
        learned = F.log_softmax(logits / temperature, dim=1)
        divergence = F.kl_div(learned, taught, reduction="sum", log_target=True)
        # The gradient at a temperature T is smaller by T squared.
        return (1 - weight) * loss + weight * temperature**2 * divergence


def load_teacher(config: RunConfig, context: RunContext, data: "Data", shape: tuple[int, int, int]) -> Teacher | None:
    """The teacher that loss.teacher names, on the device; images are of `shape` (channels, height, width).

    Raises ConfigError where it is no finished run, or one of other classes or images.
    """
    if config.loss.teacher is None:
        return None
    run = RunDir(Path(config.loss.teacher))
    _check_run(run, data)
    from configs.loader import load_config  # the only one of a rank that needs YAML: 10 ms

    its = load_config(run.config, ()).config
    if its.loss.name == "bce":
        raise ConfigError(
            f"loss.teacher: {run.path} was trained with loss.name: bce, whose answers are each a yes or no, and no "
            "shares of one; use a teacher of cross_entropy or nll"
        )
    with torch.random.fork_rng():
        model = build_model(its.model, data.num_classes, shape, its.seed, context.dtype)
    tensors, path = read_weights(config.loss.teacher, "loss.teacher")
    check_fits(shapes_of(model.state_dict()), shapes_of(tensors), path)
    copy_into(model, tensors)
    model = model.requires_grad_(False).eval().to(context.device)
    _try(model, shape, context, run)
    scale, shift = (tensor.to(context.device) for tensor in _to_its_pixels(its, data, shape[0], context.dtype))
    loss = config.loss
    how = f"{loss.teacher_weight:g} of the loss, at temperature {loss.teacher_temperature:g}"
    line = f"teacher    {run.path}: {its.model.name}, {how}"
    return Teacher(model, loss, context, scale, shift, sha256(path), line)


def _check_run(run: RunDir, data: "Data") -> None:
    if not run.config.is_file() or not run.weights.is_file():
        raise ConfigError(f"loss.teacher: {run.path} is no finished run; give the folder of one, such as runs/NAME")
    classes = json.loads(run.classes.read_text(encoding="utf-8")) if run.classes.is_file() else None
    if classes is not None and data.classes is not None and classes != list(data.classes):
        theirs, ours = some(classes), some(list(data.classes))
        raise ConfigError(
            f"loss.teacher: {run.path} knows the classes {theirs}, and the data have {ours}; they must be the same, in "
            "the same order"
        )


def _try(model: nn.Module, shape: tuple[int, int, int], context: RunContext, run: RunDir) -> None:
    """That it takes the images, before training has begun."""
    try:
        with torch.no_grad(), context.autocast():
            model(torch.zeros(2, *shape, dtype=context.dtype, device=context.device))
    except Exception as error:
        raise ConfigError(
            f"loss.teacher: the network of {run.path} does not take images of {' x '.join(map(str, shape))}: "
            f"{first_line(error)}; use a teacher of such images"
        ) from error


def _to_its_pixels(its: RunConfig, data: "Data", channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    known = KNOWN_DATA.get(its.data.name)
    mean, std = its.data.mean or (known.mean if known else None), its.data.std or (known.std if known else None)
    normalised = normalised_for(its, dataclasses.replace(data, mean=mean, std=std), channels)
    own_mean, own_std = _column(data.mean, 0.0), _column(data.std, 1.0)
    mean_there, std_there = _column(normalised.mean, 0.0), _column(normalised.std, 1.0)
    return (own_std / std_there).to(dtype), ((own_mean - mean_there) / std_there).to(dtype)


def _column(values: tuple[float, ...] | None, default: float) -> Tensor:
    """float64 (channels or 1, 1, 1)."""
    return torch.tensor(values or (default,), dtype=torch.float64).reshape(-1, 1, 1)
