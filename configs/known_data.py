"""Facts about the built-in data sets, so that `plan` can count without torch and without the files."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KnownData:
    """Sizes are images; mean and std are per channel of pixels in [0, 1]; `folder` under data.root is torchvision's."""

    torchvision_name: str
    folder: str
    files: tuple[str, ...]
    num_train: int
    num_eval: int
    num_classes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] | None = None
    """None where the files themselves name them."""

    def is_complete(self, root: Path) -> bool:
        """Whether all that torchvision reads is there; prepare.py puts it there in one move."""
        return all((root / self.folder / name).is_file() for name in self.files)


IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_DIGITS = (
    *("0 - zero", "1 - one", "2 - two", "3 - three", "4 - four"),
    *("5 - five", "6 - six", "7 - seven", "8 - eight", "9 - nine"),
)
_CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

IMAGE_FOLDER, WEBDATASET, HUGGING_FACE = "imagefolder", "webdataset", "huggingface"
ENCODED = (IMAGE_FOLDER, WEBDATASET, HUGGING_FACE)
"""Names of data sets of encoded images: a folder for each class, tars, Arrow tables. The rest is in them."""

KNOWN_DATA = {
    "mnist": KnownData(
        torchvision_name="MNIST",
        folder="MNIST/raw",
        files=IDX_FILES,
        num_train=60_000,
        num_eval=10_000,
        num_classes=10,
        shape=(1, 28, 28),
        mean=(0.1307,),
        std=(0.3081,),
        classes=_DIGITS,
    ),
    "fashion_mnist": KnownData(
        torchvision_name="FashionMNIST",
        folder="FashionMNIST/raw",
        files=IDX_FILES,
        num_train=60_000,
        num_eval=10_000,
        num_classes=10,
        shape=(1, 28, 28),
        mean=(0.2860,),
        std=(0.3530,),
        classes=_CLOTHES,
    ),
    "cifar10": KnownData(
        torchvision_name="CIFAR10",
        folder="cifar-10-batches-py",
        files=(*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"),
        num_train=50_000,
        num_eval=10_000,
        num_classes=10,
        shape=(3, 32, 32),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": KnownData(
        torchvision_name="CIFAR100",
        folder="cifar-100-python",
        files=("train", "test", "meta"),
        num_train=50_000,
        num_eval=10_000,
        num_classes=100,
        shape=(3, 32, 32),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}
