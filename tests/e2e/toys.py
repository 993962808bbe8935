"""Networks and data for the tests of the command line, named in configurations as `tests.e2e.toys:NAME`."""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.dist.toys import Images, finish_writing

EVAL_BATCH = 7
_fsync = os.fsync


def hold_in(moment: str) -> None:
    """If the test holds the ranks in this moment ($HOLD_IN), make $HOLD/held-RANK and wait for $HOLD/go."""
    if os.environ.get("HOLD_IN") == moment:
        folder = Path(os.environ["HOLD"])
        (folder / f"held-{os.environ.get('RANK', '0')}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)


class Pooled(nn.Module):
    """Takes images of any size."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.mean((2, 3)))
        return logits


class Held(nn.Module):
    """Says hello, and at training forward pass $HOLD_AT (counted from 0 in this process) makes the file
    $HOLD/held-RANK and waits for $HOLD/go. Dropout and BatchNorm are what a resume gets wrong first."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.rank, self.calls = os.environ.get("RANK", "0"), 0
        self.hold_at, self.folder = int(os.environ.get("HOLD_AT", "-1")), Path(os.environ.get("HOLD", ""))
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(4 * 64, num_classes))
        print(f"hello from rank {self.rank}")

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            if self.calls == self.hold_at:
                self.hold()
            self.calls += 1
        logits: Tensor = self.head(self.features(images))
        return logits

    def hold(self) -> None:
        finish_writing()
        (self.folder / f"held-{self.rank}").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.01)


class Unkeyed(nn.Module):
    """Its weights depend on when it was built, so no two runs are the same."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)
        self.register_buffer("shift", torch.tensor(time.time() % 1))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        return logits * (1 + self.shift)


class HeldAnywhere(Held):
    """Waits while it is built, in an evaluation, in a save or in the last step of 16, too."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        hold_in("building")
        os.fsync = self.fsync

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self.calls == 15:
            hold_in("the last step")
        if self.training and self.calls == 8 and os.environ.get("HOLD_IN") == "a save":  # which runs beside training
            while not (self.folder / "go").exists():
                time.sleep(0.01)
        if not self.training and len(images) == EVAL_BATCH:
            hold_in("an evaluation")
        return super().forward(images)

    @staticmethod
    def fsync(descriptor: int) -> None:
        if "/checkpoints/" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            hold_in("a save")
        _fsync(descriptor)


class HeldImages(Images):
    """Waits before it gives the tenth sample that a worker reads."""

    reads = 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.reads == 9:
            hold_in("loading")
        self.reads += 1
        return super().__getitem__(index)


def held_images(train: bool) -> Images:
    return HeldImages(64, 1) if train else Images(23, 2)
