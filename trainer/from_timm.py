"""Networks of timm by name, and the weights that it publishes for them. timm is optional."""

import importlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from configs.errors import ConfigError
from configs.values import did_you_mean
from trainer.published import Published

HUB_FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of the file with the weights on the hub, in the order in which timm looks for them."""


def library(name: str) -> Any:
    """The module timm.models. Raises ConfigError if it is not installed, or has no network `name`."""
    try:
        models = importlib.import_module("timm.models")
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise ConfigError(f"model.name: timm/{name} needs timm, which is not installed; `pip install timm`") from error
    network, _, tag = name.partition(".")
    if not models.is_model(network):
        near = did_you_mean(network, models.list_models())
        raise ConfigError(f"model.name: timm has no model {network!r}{near or '; timm.list_models() has all'}")
    if tag:
        _check_tag(models, network, tag, "model.name")
    return models


def builder(name: str) -> Callable[..., nn.Module]:
    """A function that makes the network without weights."""
    return partial(library(name).create_model, name, pretrained=False)


def arguments(args: dict[str, Any], num_classes: int, channels: int) -> dict[str, Any]:
    """What to call the builder with."""
    return {"num_classes": num_classes, "in_chans": channels} | args


def published(name: str, args: dict[str, Any], which: str) -> Published:
    """The weights with the tag `which`; for `default` those of the name's own tag, or timm's first choice."""
    models = library(name)
    network = name.partition(".")[0]
    if which != "default":
        _check_tag(models, network, which, "model.weights")
        name = f"{network}.{which}"
    facts = models.get_pretrained_cfg(name)
    if facts is None or not facts.has_weights:
        raise ConfigError(f"model.weights: timm has none for {name}; use model.weights: none or give a path")
    own = {key: value for key, value in args.items() if key not in ("num_classes", "in_chans")}

    def as_published(path: Path) -> nn.Module:
        source = {"file": str(path), "custom_load": facts.custom_load}
        network: nn.Module = models.create_model(name, pretrained=True, pretrained_cfg_overlay=source, **own)
        return network

    side = facts.input_size[-1]
    files = (facts.hf_hub_filename,) if facts.hf_hub_filename else HUB_FILES
    return Published(
        name=name,
        label=f"{facts.tag or 'the weights'} of timm",
        mean=tuple(facts.mean),
        std=tuple(facts.std),
        view=(math.floor(side / facts.crop_pct), side, facts.interpolation),
        url=None if facts.hf_hub_id else facts.url,
        hub=(facts.hf_hub_id, files) if facts.hf_hub_id else None,
        build=as_published,
    )


def _check_tag(models: Any, network: str, tag: str, key: str) -> None:
    tags = [full.partition(".")[2] for full in models.get_arch_pretrained_cfgs(network)]
    if tag not in tags:
        names = ", ".join(name for name in tags if name) or "none"
        raise ConfigError(f"{key}: timm has no weights {tag!r} for {network}; it has {names}{did_you_mean(tag, tags)}")
