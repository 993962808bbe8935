"""Facts about the built-in data sets, so that `plan` can count without torch and without the files."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownData:
    """Sizes are images; `mean` and `std` are per channel of pixels in [0, 1]; `folder` is torchvision's, under
    data.root."""

    torchvision_name: str
    folder: str
    num_train: int
    num_eval: int
    num_classes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


KNOWN_DATA = {
    "mnist": KnownData("MNIST", "MNIST/raw", 60_000, 10_000, 10, (1, 28, 28), (0.1307,), (0.3081,)),
    "fashion_mnist": KnownData(
        "FashionMNIST", "FashionMNIST/raw", 60_000, 10_000, 10, (1, 28, 28), (0.2860,), (0.3530,)
    ),
    "cifar10": KnownData(
        "CIFAR10",
        "cifar-10-batches-py",
        50_000,
        10_000,
        10,
        (3, 32, 32),
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
    "cifar100": KnownData(
        "CIFAR100",
        "cifar-100-python",
        50_000,
        10_000,
        100,
        (3, 32, 32),
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
    ),
}
