"""Names to networks."""

import inspect
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError, EnvironmentProblem
from configs.known_models import TORCHVISION_MODELS
from configs.sections import ModelConfig
from configs.values import did_you_mean
from trainer.data.datasets import load_callable


class MLP(nn.Module):
    """A fully connected net on flattened images; `log_softmax` for the nll loss."""

    def __init__(
        self,
        num_classes: int,
        image_shape: tuple[int, int, int],
        hidden: tuple[int, ...] = (128, 64),
        log_softmax: bool = False,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape
        sizes = (channels * height * width, *hidden, num_classes)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.log_softmax = log_softmax

    def forward(self, images: Tensor) -> Tensor:
        # Functions, not modules, between the layers: in a net this small a module's call is felt.
        *hidden, head = self.layers
        x = images.flatten(1)
        for layer in hidden:
            x = F.relu(layer(x))
        x = head(x)
        return F.log_softmax(x, dim=1) if self.log_softmax else x


def random_layers(model: nn.Module) -> list[str]:
    """Names of the modules that draw random numbers in training, as far as their class and its rate tell."""
    return [name or type(module).__name__ for name, module in model.named_modules() if _draws(module)]


def _draws(module: nn.Module) -> bool:
    kind = type(module).__name__
    is_dropout = "Drop" in kind or kind == "StochasticDepth"
    names = ("p", "drop_prob") if is_dropout else ("dropout",)  # the last of attention and recurrent layers
    rates = [getattr(module, name, 0) for name in names]
    return isinstance(module, nn.RReLU) or any(isinstance(rate, int | float) and rate > 0 for rate in rates)


def _conv(
    before: int, after: int, *, kernel: int = 3, stride: int = 1, padding: int = 1, pool: bool = False
) -> nn.Module:
    """Convolution, BatchNorm, ReLU; `pool` halves the image before the norm, so that the rest works on a quarter."""
    conv = nn.Conv2d(before, after, kernel, stride=stride, padding=padding, bias=False)
    return nn.Sequential(conv, *([nn.MaxPool2d(2)] if pool else []), nn.BatchNorm2d(after), nn.ReLU(inplace=True))


class MnistCNN(nn.Module):
    """Five convolutions for small grey images: a stride at once, so that most of the work is on 14x14 and 7x7, and the
    strongest answer of each feature, wherever it is, goes to the linear head."""

    def __init__(self, num_classes: int, image_shape: tuple[int, int, int], width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _conv(image_shape[0], width, kernel=4, stride=2),
            _conv(width, width),
            _conv(width, 2 * width, pool=True),
            _conv(2 * width, 2 * width),
            _conv(2 * width, 4 * width, padding=0),
        )
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images)
        # Not amax(), whose backward pass shares out among equals and takes three times as long.
        logits: Tensor = self.head(F.max_pool2d(features, features.shape[2:]).flatten(1))
        return logits


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., https://arxiv.org/abs/1512.03385),
    1x1 where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = _conv(before, after, stride=stride)
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after))
        changes = stride != 1 or before != after
        self.shortcut = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))
            if changes
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """The CIFAR residual net of He et al.: 3x3 stem, three stages of `depth` blocks,
    widths w, 2w, 4w, global average pooling."""

    def __init__(self, num_classes: int, image_shape: tuple[int, int, int], width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.stem = _conv(image_shape[0], width)
        blocks: list[nn.Module] = []
        before = width
        for stage in range(3):
            after = width << stage
            for block in range(depth):
                blocks.append(ResidualBlock(before, after, 2 if stage and not block else 1))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return logits


# Without the second heads of their training, which give a tuple; the slow first values as published.
_WITHOUT_AUXILIARY: dict[str, dict[str, Any]] = {
    name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")
}
BUILT_IN: dict[str, type[nn.Module]] = {"mlp": MLP, "mnist_cnn": MnistCNN, "small_resnet": SmallResNet}


def may_draw(model: nn.Module) -> bool:
    """Whether it may draw random numbers, by functions too: only of the built-in ones it is known that they do not."""
    return type(model) not in BUILT_IN.values()


def build_model(
    config: ModelConfig, num_classes: int, image_shape: tuple[int, int, int], seed: int, dtype: torch.dtype
) -> nn.Module:
    """The network on the CPU, initialised from `seed` alone. `image_shape` is (channels, height, width)."""
    torch.manual_seed(seed)
    build, arguments = _resolve(config, num_classes, image_shape)
    try:
        inspect.signature(build).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"model.args do not fit {config.name}: {error}; it takes {inspect.signature(build)}"
        ) from error
    try:
        model = build(**arguments)
    except TypeError as error:
        if not _is_of_library(config.name):
            raise
        raise ConfigError(f"model.args do not fit {config.name}: {error}") from error
    if torchvision_name(config.name) is not None:
        _fit_input(model, image_shape[0])
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.name: {config.name} gave a {type(model).__name__}; wanted is a torch.nn.Module")
    return _dense(model.to(dtype))


def _dense(model: nn.Module) -> nn.Module:
    """`model` with no parameter that is a part of a larger tensor, every second column for one: fused kernels and
    gradients take it for one block of memory, and would write what lies between."""
    for parameter in model.parameters():
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            parameter.data = parameter.data.clone()
    return model


def _resolve(config: ModelConfig, num_classes: int, image_shape: tuple[int, int, int]) -> tuple[Any, dict[str, Any]]:
    if config.name in BUILT_IN:
        return BUILT_IN[config.name], {"num_classes": num_classes, "image_shape": image_shape} | config.args
    if (name := torchvision_name(config.name)) is not None:
        # 2 s of import, paid only by those who use it.
        from torchvision.models import get_model_builder, list_models

        if name not in list_models():
            raise ConfigError(f"model.name: torchvision has no model {name!r}{did_you_mean(name, list_models())}")
        return get_model_builder(name), {"num_classes": num_classes} | _WITHOUT_AUXILIARY.get(name, {}) | config.args
    if config.name.startswith("timm/"):
        timm, name = import_timm(), config.name.removeprefix("timm/")
        if not timm.is_model(name):
            raise ConfigError(f"model.name: timm has no model {name!r}{did_you_mean(name, timm.list_models())}")
        fixed = {"num_classes": num_classes, "in_chans": image_shape[0]}
        return partial(timm.create_model, name), fixed | config.args
    return load_callable(config.name, "model.name"), {"num_classes": num_classes} | config.args


def torchvision_name(name: str) -> str | None:
    """What torchvision calls the network `name`; None for others'."""
    return name.removeprefix("torchvision/") if name.startswith("torchvision/") or name in TORCHVISION_MODELS else None


def _is_of_library(name: str) -> bool:
    return torchvision_name(name) is not None or name.startswith("timm/")


def import_timm(wanted: str = "model.name: timm/NAME") -> Any:
    """timm, which is not installed with the rest. Raises EnvironmentProblem if it is missing."""
    try:
        import timm
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(
            f"{wanted} needs timm, which is not installed: make setup PIP_ARGS=timm, or pip install timm"
        ) from error
    return timm


def _fit_input(model: nn.Module, channels: int) -> None:
    """Have torchvision's network, made for three channels, take `channels`: its first convolution is another."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            if layer.in_channels != channels:
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, _for_channels(layer, channels))
            return


def _for_channels(layer: nn.Conv2d, channels: int) -> nn.Conv2d:
    return nn.Conv2d(
        channels,
        layer.out_channels,
        layer.kernel_size,  # type: ignore[arg-type]  # a tuple of two
        layer.stride,  # type: ignore[arg-type]
        layer.padding,  # type: ignore[arg-type]
        bias=layer.bias is not None,
    )


def rank_bound_layers(model: nn.Module) -> list[str]:
    """Layers that make another number of processes another training: they see or draw what belongs to one rank."""
    norms = [
        f"{name} ({type(layer).__name__}: its statistics are those of a rank's part of the batch)"
        for name, layer in model.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
    ]
    return norms + [f"{name} (drawn by each rank)" for name in random_layers(model)]
