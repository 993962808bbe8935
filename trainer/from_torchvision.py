"""Networks of torchvision by name, and the weights that it publishes for them. Importing it takes 2 s."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.errors import ConfigError
from configs.values import did_you_mean
from trainer.published import Published
from trainer.weights import adapted_channels

AUXILIARY = {"googlenet", "inception_v3"}
"""Networks that in training answer with a tuple, auxiliary heads beside the logits, unless told not to."""


def builder(name: str) -> Callable[..., nn.Module]:
    """torchvision's function that makes the network. Raises ConfigError if it has none for classifying images."""
    from torchvision import models

    known = models.list_models(module=models)
    if name in known:
        build: Callable[..., nn.Module] = models.get_model_builder(name)
        return build
    if name in models.list_models():
        raise ConfigError(f"model.name: torchvision's {name} does not classify images; use a network such as resnet18")
    raise ConfigError(f"model.name: torchvision has no model {name!r}{did_you_mean(name, known) or '; see its page'}")


def arguments(name: str, args: dict[str, Any], num_classes: int, *, has_weights: bool) -> dict[str, Any]:
    """What to call the builder with."""
    ours: dict[str, Any] = {"num_classes": num_classes}
    if name in AUXILIARY:
        if args.get("aux_logits"):
            raise ConfigError(
                f"model.args: aux_logits: true makes {name} answer with a tuple, and a loss takes one tensor; leave it "
                "out"
            )
        # Its weights want another normalisation than torchvision's, and the network then does the rest.
        ours |= {"aux_logits": False, "init_weights": True} | ({"transform_input": True} if has_weights else {})
    return ours | args


def with_channels(model: nn.Module, name: str, channels: int) -> nn.Module:
    """`model`, made for RGB, with a first convolution for `channels`: initial weights of the same kind, adapted."""
    if channels == 3:
        return model
    if getattr(model, "transform_input", False):
        raise ConfigError(
            f"model.name: {name} changes red, green and blue each in its own way (transform_input) and the images have "
            f"{channels} channels; use another network"
        )
    where = next(where for where, module in model.named_modules() if isinstance(module, nn.Conv2d))
    old = model.get_submodule(where)
    assert isinstance(old, nn.Conv2d)
    settings = {key: getattr(old, key) for key in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
    new = nn.Conv2d(channels, old.out_channels, bias=old.bias is not None, **settings)
    with torch.no_grad():
        new.weight.copy_(adapted_channels(old.weight, channels))
        if old.bias is not None and new.bias is not None:
            new.bias.copy_(old.bias)
    parent, _, own = where.rpartition(".")
    setattr(model.get_submodule(parent), own, new)
    return model


def published(name: str, args: dict[str, Any], which: str) -> Published:
    """The weights that are called `which`, or the best ones for `default`."""
    from torchvision.models import get_model_weights

    build = builder(name)
    known = get_model_weights(name)
    own_names = [weights.name for weights in known]  # without aliases
    if which != "default" and which not in known.__members__:
        names = ", ".join(own_names) or "none"
        raise ConfigError(f"model.weights: torchvision has no weights {which!r} for {name}; it has {names}")
    if not own_names:
        raise ConfigError(f"model.weights: torchvision has none for {name}; use model.weights: none or give a path")
    chosen = known.DEFAULT if which == "default" else known[which]
    transforms = chosen.transforms()
    own = {key: value for key, value in args.items() if key not in ("num_classes", "aux_logits")}

    def as_published(_: Path) -> nn.Module:
        with only_tensors():
            return build(weights=chosen, progress=False, **own)

    return Published(
        name=name,
        label=f"{chosen.name} of torchvision",
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
        view=(*transforms.resize_size, *transforms.crop_size, transforms.interpolation.value),
        url=chosen.url,
        build=as_published,
    )


@contextlib.contextmanager
def only_tensors() -> Iterator[None]:
    """Inside, torch.load reads tensors and nothing that could run code, though torchvision does not ask it to."""
    names = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
