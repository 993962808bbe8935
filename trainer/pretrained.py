"""Weights to start from: those that torchvision and timm publish, or a file's, fitted to the data's classes and
channels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from configs.errors import CheckpointError, ConfigError, EnvironmentProblem
from configs.sections import ModelConfig
from configs.values import is_published
from trainer.models import import_timm, torchvision_name

Stats = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel."""
_WRAPPERS = ("state_dict", "model")
"""Where training scripts put the weights in a file with more in it."""
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
"""Heads of GoogLeNet and Inception that training from pretrained weights does without."""


def fetch(config: ModelConfig) -> None:
    """Have published weights in the library's cache, checked by their hash. Raises EnvironmentProblem if they cannot be
    had."""
    if config.weights is not None and is_published(config.weights):
        _published(config)


def load_pretrained(model: nn.Module, config: ModelConfig, num_classes: int) -> str:
    """Copy the weights that `config` names into `model`; returns what to say of it.

    What has another number of classes keeps its first values, and a first convolution is fitted to the channels of the
    data. Raises CheckpointError if anything else differs.
    """
    assert config.weights is not None
    found = _published(config) if is_published(config.weights) else _from_file(Path(config.weights))
    found = {name: tensor for name, tensor in found.items() if not name.startswith(_AUXILIARY)}
    own, fitted, anew, problems = model.state_dict(), dict[str, Tensor](), list[str](), list[str]()
    problems += [f"{name}: the network has no such tensor" for name in sorted(found.keys() - own.keys())]
    for name, tensor in own.items():
        if name not in found:
            if not name.endswith("num_batches_tracked"):
                problems.append(f"{name}: the weights have no such tensor")
        elif found[name].shape == tensor.shape:
            fitted[name] = found[name]
        elif _is_head(found[name], tensor, num_classes):
            anew.append(name)
        elif _is_input(found[name], tensor):
            fitted[name] = fit_channels(found[name], tensor.shape[1])
        else:
            problems.append(f"{name}: {list(found[name].shape)} in the weights, {list(tensor.shape)} in the network")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(
            f"model.weights: {config.weights} does not fit {config.name}: {'; '.join(problems[:5])}{more}; give "
            "weights of this network"
        )
    model.load_state_dict(own | fitted)
    return _describe(config.weights, anew, [n for n, t in fitted.items() if found[n].shape != t.shape], num_classes)


def _describe(weights: str, anew: list[str], channels: list[str], num_classes: int) -> str:
    text = f"weights    {weights}"
    if anew:
        text += f"; new for {num_classes} classes: {', '.join(anew)}"
    return text + (f"; fitted to the channels: {', '.join(channels)}" if channels else "")


def _is_head(found: Tensor, own: Tensor, num_classes: int) -> bool:
    return own.ndim > 0 and own.shape[0] == num_classes and found.shape[1:] == own.shape[1:]


def _is_input(found: Tensor, own: Tensor) -> bool:
    return found.ndim == own.ndim == 4 and found.shape[0] == own.shape[0] and found.shape[2:] == own.shape[2:]


def fit_channels(weight: Tensor, channels: int) -> Tensor:
    """A convolution's weight (out, in, H, W) for another number of input channels: one sees the sum, more see copies
    that add up to as much, as timm has it."""
    if channels == 1:
        return weight.sum(1, keepdim=True)
    copies = weight.repeat(1, -(-channels // weight.shape[1]), 1, 1)[:, :channels]
    return copies * (weight.shape[1] / channels)


def published_stats(config: ModelConfig) -> Stats | None:
    """Of the pixels in [0, 1] that published weights were trained on; None for other weights."""
    if config.weights is None or not is_published(config.weights):
        return None
    if config.name.startswith("timm/"):
        found = import_timm().get_pretrained_cfg(config.name.removeprefix("timm/"))
        return tuple(found.mean), tuple(found.std)
    transforms = _entry(config).transforms()
    return tuple(transforms.mean), tuple(transforms.std)


def _published(config: ModelConfig) -> dict[str, Tensor]:
    try:
        if config.name.startswith("timm/"):
            if config.weights != "default":
                raise ConfigError(f"model.weights: {config.weights}: of timm's there is `default`; others have a name")
            network = import_timm().create_model(config.name.removeprefix("timm/"), pretrained=True)
            return dict(network.state_dict())
        return dict(_entry(config).get_state_dict(progress=False, check_hash=True))
    except (ConfigError, EnvironmentProblem):
        raise
    except Exception as error:  # of the network, the disk, the hub, or a hash that is another
        text = "".join(str(error).splitlines()[:1])
        raise EnvironmentProblem(
            f"model.weights: {config.weights} of {config.name} could not be had: {type(error).__name__}: {text}; give "
            "the path of a file that holds them"
        ) from error


def _entry(config: ModelConfig) -> Any:
    """torchvision's entry of these weights."""
    name = torchvision_name(config.name)
    if name is None:
        raise ConfigError(f"model.weights: {config.name} has no published weights; give the path of a file")
    from torchvision.models import get_model_weights

    known = get_model_weights(name)
    try:
        return known.DEFAULT if config.weights == "default" else known[str(config.weights)]
    except KeyError:
        names = ", ".join(entry.name for entry in known)
        raise ConfigError(f"model.weights: {name} has no {config.weights}; it has {names} and default") from None


def _from_file(path: Path) -> dict[str, Tensor]:
    """Tensors by name: of a safetensors file, of a torch file, from which nothing is run, or of a run folder."""
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"model.weights: there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return _tensors_in(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # of many classes: what is no such file, or one that would run code
        text = "".join(str(error).splitlines()[:1])
        raise CheckpointError(
            f"model.weights: {path} holds no weights that can be read without running code: {type(error).__name__}: "
            f"{text}; save the network's state_dict() as safetensors"
        ) from error


def _tensors_in(content: Any) -> dict[str, Tensor]:
    """The state_dict in a file's content; names without the `module.` that DataParallel puts before them."""
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"it is a {type(content).__name__}")
    if other := next((name for name, value in content.items() if not isinstance(value, Tensor)), None):
        raise ValueError(f"{other} is no tensor")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}
