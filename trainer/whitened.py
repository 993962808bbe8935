"""A small fast convolution net for CIFAR-10, after Keller Jordan's airbench (https://arxiv.org/abs/2404.00498)."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WhitenedCNN(nn.Module):
    """A fixed whitening convolution, three groups of convolutions, each on half the side, the strongest answer of each
    feature, and a head whose logits are scaled down."""

    MIN_SIDE = 9
    """Pixels of the smallest images of which something is left."""

    def __init__(
        self,
        num_classes: int,
        image_shape: tuple[int, int, int],
        widths: tuple[int, int, int] = (64, 256, 256),
        depth: int = 2,
        norm_momentum: float = 0.4,
    ) -> None:
        """`depth` is of a group, in convolutions; from 3 on it has a shortcut. `norm_momentum` is the weight of a new
        batch in BatchNorm's running statistics."""
        super().__init__()
        self.whitening = Whitening(image_shape[0])
        before = (self.whitening.width, *widths)
        self.groups = nn.Sequential(
            *(_Group(old, new, depth, norm_momentum) for old, new in zip(before, widths, strict=False))
        )
        self.head = nn.Linear(widths[-1], num_classes, bias=False)

    def begin_with(self, batches: Iterable[Tensor]) -> None:
        self.whitening.begin_with(batches)

    def forward(self, images: Tensor) -> Tensor:
        features = self.groups(F.gelu(self.whitening(images)))
        logits: Tensor = self.head(F.max_pool2d(features, features.shape[2:]).flatten(1))
        return logits / 9


class Whitening(nn.Module):
    """Patches of 2 x 2 pixels onto the eigenvectors of their covariance, each to unit variance, and to their negatives.
    Only the bias learns."""

    EPS = 5e-4
    """Added to the eigenvalues: those that are next to nothing are noise."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.width = 2 * channels * 4
        self.conv = nn.Conv2d(channels, self.width, 2, bias=False)
        self.conv.weight.requires_grad = False
        # Of three dimensions: to the optimizer it is no bias of a norm, which learns at another rate.
        self.bias = nn.Parameter(torch.zeros(self.width, 1, 1))

    @torch.no_grad()
    def begin_with(self, batches: Iterable[Tensor]) -> None:
        """Of batches of normalised training images (N, C, H, W)."""
        width = self.width // 2
        moments, count = torch.zeros(width, width, dtype=torch.float64), 0
        for images in batches:
            patches = F.unfold(images.double(), 2).transpose(1, 2).flatten(0, 1)
            moments += patches.T @ patches
            count += len(patches)
        values, vectors = torch.linalg.eigh(moments / count)
        # Largest first; a vector's sign is anyone's choice, and both are there.
        rows = (vectors / (values + self.EPS).sqrt()).T.flip(0)
        self.conv.weight.copy_(torch.cat([rows, -rows]).reshape(self.conv.weight.shape))

    def forward(self, images: Tensor) -> Tensor:
        whitened: Tensor = self.conv(images) + self.bias
        return whitened


class _Group(nn.Module):
    def __init__(self, before: int, after: int, depth: int, norm_momentum: float) -> None:
        super().__init__()
        self.convs = nn.ModuleList(_conv(before if n == 0 else after, after) for n in range(depth))
        self.norms = nn.ModuleList(_norm(after, norm_momentum) for _ in range(depth))

    def forward(self, images: Tensor) -> Tensor:
        x = F.gelu(self.norms[0](F.max_pool2d(self.convs[0](images), 2)))
        shortcut = x
        for conv, norm in zip(self.convs[1:-1], self.norms[1:-1], strict=True):
            x = F.gelu(norm(conv(x)))
        x = self.norms[-1](self.convs[-1](x))
        return F.gelu(x + shortcut if len(self.convs) > 2 else x)


def _conv(before: int, after: int) -> nn.Conv2d:
    """Passes its inputs on to begin with, as a shortcut would; what outputs there are beyond them is random."""
    conv = nn.Conv2d(before, after, 3, padding="same", bias=False)
    nn.init.dirac_(conv.weight.data[:before])
    return conv


def _norm(features: int, momentum: float) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(features, eps=1e-12, momentum=momentum)
    norm.weight.requires_grad = False
    return norm
