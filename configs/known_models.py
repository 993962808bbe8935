"""Names of networks, so that a typo is told without torch: those of this project and of torchvision."""

import re

BUILT_IN_MODELS = ("mlp", "mnist_cnn", "small_resnet", "whitened_cnn")

TORCHVISION = "torchvision/"
TIMM = "timm/"

TORCHVISION_MODELS = (
    "alexnet",
    *("convnext_base", "convnext_large", "convnext_small", "convnext_tiny"),
    *("densenet121", "densenet161", "densenet169", "densenet201"),
    *(f"efficientnet_b{number}" for number in range(8)),
    *("efficientnet_v2_l", "efficientnet_v2_m", "efficientnet_v2_s"),
    *("googlenet", "inception_v3", "maxvit_t"),
    *("mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3"),
    *("mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small"),
    *(f"regnet_x_{size}" for size in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf")),
    *(f"regnet_y_{size}" for size in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf", "128gf")),
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
    *("shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0"),
    *("squeezenet1_0", "squeezenet1_1"),
    *("swin_b", "swin_s", "swin_t", "swin_v2_b", "swin_v2_s", "swin_v2_t"),
    *(f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")),
    *("vit_b_16", "vit_b_32", "vit_h_14", "vit_l_16", "vit_l_32"),
    *("wide_resnet50_2", "wide_resnet101_2"),
)
"""Those that classify images, as of torchvision 0.23 to 0.29. A newer one is torchvision/NAME."""

NO_WEIGHTS = "none"
_PUBLISHED = re.compile(r"\w+", re.ASCII)


def torchvision_name(name: str) -> str | None:
    """torchvision's own name of the network `name`; None if it is not torchvision's."""
    if name.startswith(TORCHVISION):
        return name.removeprefix(TORCHVISION)
    return name if name in TORCHVISION_MODELS else None


def timm_name(name: str) -> str | None:
    """timm's own name of the network `name`, with a tag where it has one; None if it is not timm's."""
    return name.removeprefix(TIMM) if name.startswith(TIMM) else None


def is_library_model(name: str) -> bool:
    return torchvision_name(name) is not None or timm_name(name) is not None


def is_published(weights: str) -> bool:
    """Whether `model.weights` names weights that a library publishes, and not a file or a folder."""
    return weights != NO_WEIGHTS and _PUBLISHED.fullmatch(weights) is not None
