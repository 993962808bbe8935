"""Names to networks."""

import inspect
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.errors import ConfigError
from configs.known_models import is_library_model, is_published, timm_name, torchvision_name
from configs.sections import ModelConfig
from trainer.data.datasets import load_callable
from trainer.tensors import check_tensors, convert
from trainer.whitened import WhitenedCNN


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

    MIN_SIDE = 12
    """Pixels of the smallest images of which something is left."""

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


BUILT_IN: dict[str, type[nn.Module]] = {
    "mlp": MLP,
    "mnist_cnn": MnistCNN,
    "small_resnet": SmallResNet,
    "whitened_cnn": WhitenedCNN,
}


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
    model = _call(build, arguments, config.name)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.name: {config.name} gave a {type(model).__name__}; wanted is a torch.nn.Module")
    if (name := torchvision_name(config.name)) is not None:
        model = from_torchvision().with_channels(model, name, image_shape[0])
    check_tensors(model)
    return _dense(convert(model, dtype=dtype))


def _call(build: Any, arguments: dict[str, Any], name: str) -> Any:
    if not is_library_model(name):
        return build(**arguments)
    try:  # their builders take any argument, and the classes behind them say what they do not take
        return build(**arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"model.args do not fit {name}: {error}") from error


def _dense(model: nn.Module) -> nn.Module:
    """`model` with no parameter that is a part of a larger tensor, every second column for one: fused kernels and
    gradients take it for one block of memory, and would write what lies between."""
    for parameter in model.parameters():
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            parameter.data = parameter.data.clone()
    return model


def _check_image(name: str, image_shape: tuple[int, int, int]) -> None:
    """Raise ConfigError for images of which a built-in network would leave nothing."""
    side, (_, height, width) = getattr(BUILT_IN[name], "MIN_SIDE", 1), image_shape
    if min(height, width) < side:
        raise ConfigError(
            f"model.name: {name} takes images of {side} x {side} pixels or more, not {height} x {width}; use larger "
            "ones, or small_resnet"
        )


def _resolve(config: ModelConfig, num_classes: int, image_shape: tuple[int, int, int]) -> tuple[Any, dict[str, Any]]:
    if config.name in BUILT_IN:
        _check_image(config.name, image_shape)
        return BUILT_IN[config.name], {"num_classes": num_classes, "image_shape": image_shape} | config.args
    if (name := torchvision_name(config.name)) is not None:
        library, has_weights = from_torchvision(), is_published(config.weights)
        return library.builder(name), library.arguments(name, config.args, num_classes, has_weights=has_weights)
    if (name := timm_name(config.name)) is not None:
        from trainer import from_timm

        return from_timm.builder(name), from_timm.arguments(config.args, num_classes, image_shape[0])
    if ":" not in config.name:
        raise ConfigError(
            f"model.name: {config.name!r} is not one of {', '.join(BUILT_IN)}, a network of torchvision, timm/NAME or "
            "module:callable"
        )
    return load_callable(config.name, "model.name"), {"num_classes": num_classes} | config.args


def from_torchvision() -> ModuleType:
    """trainer.from_torchvision; its import takes 2 s, paid only by those who use it."""
    from trainer import from_torchvision as library

    return library


def rank_bound_layers(model: nn.Module) -> list[str]:
    """Layers that make another number of processes another training: they see or draw what belongs to one rank."""
    norms = [
        f"{name} ({type(layer).__name__}: its statistics are those of a rank's part of the batch)"
        for name, layer in model.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
        if layer.training  # a frozen one sees what is the same on all
    ]
    return norms + [f"{name} (drawn by each rank)" for name in random_layers(model)]
