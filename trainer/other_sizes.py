"""Images of other sizes than the network was built for: whether it takes them, and what is said of them."""

from collections.abc import Iterator

import torch
from torch import nn

from configs.data_section import DataConfig
from configs.errors import ConfigError, first_line
from configs.image_sizes import progressive_size, training_sizes
from trainer.flops import copy_to


def check_sizes(model: nn.Module, config: DataConfig, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Raise ConfigError where `model` takes images of `shape` (C, H, W) but not all that it is to see: a transformer
    with a place for each patch would fail in its first evaluation, or when images begin to grow.

    Tried without data, on the device `meta`; a network that cannot be is let pass.
    """
    own = shape[1]
    others = {*training_sizes(config), config.eval_image_size or own} - {own}
    if config.image_size is None or not others:
        return
    network = copy_to(model, model, "meta").eval()
    if _refused(network, shape[0], own, dtype):
        return
    for side in sorted(others):
        if why := _refused(network, shape[0], side, dtype):
            raise ConfigError(
                f"the network takes images of data.image_size={own} pixels and not of {side}, which "
                f"{'evaluation' if side not in training_sizes(config) else 'training'} would give it ({why}); use one "
                "size, or a network that takes any"
            )


def _refused(network: nn.Module, channels: int, side: int, dtype: torch.dtype) -> str:
    """Why the network does not take such images; empty where it does."""
    try:
        with torch.no_grad():
            network(torch.zeros(2, channels, side, side, dtype=dtype, device="meta"))
    except Exception as error:  # whatever a network raises
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def describe_sizes(config: DataConfig) -> Iterator[str]:
    """A line for the screen, where training images are not all of one size."""
    evaluation = f"evaluation {config.eval_image_size or config.image_size}"
    if config.image_sizes:
        yield f"sizes      {', '.join(map(str, training_sizes(config)))} pixels, drawn for each batch; {evaluation}"
    if config.progressive.start_size is not None:
        steps = {0: config.progressive.start_size}
        for epoch in range(config.progressive.from_epoch, config.progressive.until_epoch + 1):
            if (side := progressive_size(config, epoch)) not in steps.values():
                steps[epoch] = side
        grow = ", ".join(f"{side} from epoch {epoch}" for epoch, side in steps.items())
        yield f"sizes      {grow}; {evaluation}"
