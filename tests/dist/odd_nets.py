"""Networks that are hard to train with the same bits on any number of processes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm


class OddParameters(nn.Module):
    """Frozen, unused, unused by some shards, used twice, of no dimension, transposed, every second column of another
    tensor; and a module under two names."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = self.again = nn.Linear(64, 64, bias=False)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.transposed = nn.Parameter(torch.randn(32, 64).t() / 8)
        self.columns = nn.Parameter(torch.randn(32, 2 * num_classes)[:, ::2] / 8)

    def forward(self, images: Tensor) -> Tensor:
        x = self.again(self.first(images.flatten(1)).relu()) * self.scale + self.frozen(images.flatten(1))
        if self.training and float(torch.rand(())) < 0.5:
            x = x + self.sometimes(x)
        return x.relu() @ self.transposed @ self.columns


class OddNorms(nn.Module):
    """BatchNorm in one, two and three dimensions: called twice, not always, frozen, without a momentum of its own."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.BatchNorm1d(8), nn.BatchNorm2d(2), nn.BatchNorm3d(1)
        self.frozen = nn.BatchNorm2d(1, momentum=0.5)
        self.frozen.running_mean.fill_(0.3)  # type: ignore[union-attr]
        self.unkept = nn.BatchNorm1d(8, track_running_stats=False)
        self.instances = nn.InstanceNorm2d(2, track_running_stats=True)
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.head = nn.Linear(16, num_classes)

    def train(self, mode: bool = True) -> "OddNorms":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        x = self.three(self.frozen(images)[:, None])[:, 0]
        x = self.instances(self.conv(x))
        if not self.training or float(torch.rand(())) < 0.5:
            x = self.two(x)
        x = self.one(self.one(x.mean(1).relu()))
        x = self.unkept(x)
        return self.head(F.adaptive_avg_pool2d(x[:, None], 4).flatten(1))


class OddBuffers(nn.Module):
    """Buffers that change in the forward pass: counted in place, replaced, an average of what was seen, the vectors of
    a spectral norm, and one outside the state."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = spectral_norm(nn.Linear(64, 16))
        self.head = nn.Linear(16, num_classes)
        self.register_buffer("constant", torch.ones(16))
        self.register_buffer("counted", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("centre", torch.zeros(16))
        self.register_buffer("outside", torch.zeros(1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.body(images.flatten(1)) * self.constant
        if self.training:
            self.counted += 1
            self.replaced = self.replaced + 1
            self.outside.fill_(1)
            self.centre.lerp_(x.detach().mean(0), 0.1)
        logits: Tensor = self.head((x - self.centre).relu())
        return logits


class Transformer(nn.Module):
    """Rows of `width` pixels as tokens; dropout in the attention and after it."""

    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.3, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(images[:, 0]).mean(1))
        return logits


class Table(nn.Module):
    """Pixels as words. The gradient of a table that is read by indices is added up by all threads as they come, if the
    kernel may; there are enough indices for two of them."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(64, 16))
        self.body, self.head = nn.Linear(64 * 16, 256), nn.Linear(256, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.words[(images * 63).long().flatten(1)].flatten(1)).relu())
        return logits


class Overflowing(nn.Module):
    """In fp16 the gradient overflows until the loss scale is 2**12 or so, whatever the number of processes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1)) * 64.0
        return logits


class Unsynchronised(nn.Module):
    """A BatchNorm over all ranks, of the user's own making."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm, self.head = nn.SyncBatchNorm(64), nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(images.flatten(1)))
        return logits


class WithoutMomentum(nn.Module):
    """A BatchNorm that averages over all that it ever saw."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(64, momentum=None), nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(images.flatten(1)))
        return logits


class Writes(nn.Module):
    """Uses an operation without a deterministic kernel: `put_`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)
        self.put = Put()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.put(images).flatten(1))
        return logits


class Put(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.clone().put_(torch.tensor([0]), torch.tensor([1.0]))


class SharedBuffer(nn.Module):
    """One counter in two modules, changed by one and read by the other, and a view of a table."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, num_classes)
        self.body.register_buffer("calls", torch.zeros(1))
        self.head.register_buffer("calls", self.body.calls)
        self.register_buffer("table", torch.zeros(2, 16))
        self.register_buffer("row", self.table[1])  # type: ignore[index]

    def forward(self, images: Tensor) -> Tensor:
        x = self.body(images.flatten(1)).relu()
        if self.training:
            self.body.calls += 1  # type: ignore[operator]
            self.table[1] += x.detach().mean(0)  # type: ignore[index]
        logits: Tensor = self.head(x - 0.1 * self.row) * (1 + 0.1 * self.head.calls)  # type: ignore[operator]
        return logits


class OneMemory(nn.Module):
    """Two parameters that lie upon one another."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)
        self.tail = nn.Linear(64, num_classes)
        self.tail.weight = nn.Parameter(self.head.weight.data)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1)) + self.tail(images.flatten(1))
        return logits


class ByHand(nn.Module):
    """F.batch_norm on the statistics of a layer that is not called."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        mean, var = self.norm.running_mean, self.norm.running_var
        logits: Tensor = self.head(F.batch_norm(images.flatten(1), mean, var, training=self.training))
        return logits


class Lazy(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.LazyLinear(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        return logits


class Complex(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(64, num_classes, dtype=torch.complex64))

    def forward(self, images: Tensor) -> Tensor:
        return (images.flatten(1).to(torch.complex64) @ self.waves).abs()


class ByFirstBatch(nn.Module):
    """Sets a parameter by the first images that it sees, as ActNorm does."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(1)), nn.Linear(64, num_classes)
        self.is_set = False

    def forward(self, images: Tensor) -> Tensor:
        if self.training and not self.is_set:
            self.is_set = True
            self.scale.data.copy_(1 / images.std())
        logits: Tensor = self.head(images.flatten(1) * self.scale)
        return logits


class Growing(nn.Module):
    """A buffer that takes in one more row each time."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)
        self.register_buffer("seen", torch.zeros(0, 64))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, images.flatten(1).mean(0, keepdim=True)])
        logits: Tensor = self.head(images.flatten(1))
        return logits


class Later(nn.Module):
    """A buffer that is there from the first forward pass on."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)
        self.register_buffer("centre", None)

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self.centre is None:
            self.centre = torch.zeros(64)
        logits: Tensor = self.head(images.flatten(1))
        return logits


class DropsByFunction(nn.Module):
    """Dropout that no layer tells of."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(F.dropout(images.flatten(1), 0.3, self.training))
        return logits


class NormOfVectors(nn.Module):
    """A BatchNorm that cannot do with one sample."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(images.flatten(1)))
        return logits
