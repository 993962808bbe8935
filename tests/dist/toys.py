"""Small data sets and networks for the tests, named in configurations as `tests.dist.toys:NAME`."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.beat import read_beat
from trainer.saving import THREAD


class Images:
    """`size` random 1x8x8 uint8 images of four classes; the class shows as a bright quarter, so it can be learned."""

    classes = ("a", "b", "c", "d")

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = self.targets = torch.randint(0, 4, (size,), generator=generator)
        self.images = torch.randint(0, 128, (size, 1, 8, 8), generator=generator, dtype=torch.uint8)
        for image, label in zip(self.images, self.labels.tolist(), strict=True):
            image[0, 4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] += 100

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


class RecordedImages(Images):
    """Appends the index of each sample that is read to the file $READS.RANK, if the environment names one."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if "READS" in os.environ:
            with open(f"{os.environ['READS']}.{os.environ.get('RANK', '0')}", "a", encoding="ascii") as file:
                file.write(f"{index}\n")
        return super().__getitem__(index)


def images(train: bool) -> Images:
    """64 and 23 images, or as many as TRAIN_SIZE and EVAL_SIZE say."""
    if train:
        return RecordedImages(int(os.environ.get("TRAIN_SIZE", "64")), 1)
    return Images(int(os.environ.get("EVAL_SIZE", "23")), 2)


def images_that_rank_1_waits_for(train: bool) -> Images:
    """As from a file system that does not answer."""
    while os.environ.get("RANK") == "1":
        time.sleep(0.1)
    return images(train)


class FatalImages(RecordedImages):
    """Reading the sample FATAL of the training split, in a worker, does what FATAL_DOES says: a signal's name, raise,
    exit, hang, or open for files that stay open. With FATAL_STOPS the rank is asked to stop first."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == int(os.environ.get("FATAL", "-1")) and multiprocessing.parent_process():
            self.act(os.environ["FATAL_DOES"])
        return super().__getitem__(index)

    def act(self, what: str) -> None:
        if "FATAL_STOPS" in os.environ:
            os.kill(os.getppid(), signal.SIGTERM)
        if what == "raise":
            raise ValueError("boom-731\nand more")
        if what == "exit":
            os._exit(7)
        if what == "hang":
            while True:
                time.sleep(60)
        if what == "open":
            self.files = [open(os.devnull) for _ in range(10_000)]  # noqa: SIM115
        os.kill(os.getpid(), signal.Signals[what])


def fatal_images(train: bool) -> Images:
    return FatalImages(64, 1) if train else Images(23, 2)


class _RenamedImages(Images):
    classes = ("a", "b", "c", "zebra")


def renamed_classes(train: bool) -> Images:
    return _RenamedImages(64, 1) if train else _RenamedImages(23, 2)


class _OneClass(Images):
    classes = ("only",)

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size, seed)
        self.labels.zero_()


def one_class(train: bool) -> Images:
    return _OneClass(9, 1) if train else _OneClass(4, 2)


class _Hooked(nn.Module):
    """A linear net that does something at one training forward pass (counted from 0 in this process) of one rank."""

    def __init__(self, num_classes: int, rank: int = 0, step: int = 0, image_pixels: int = 64) -> None:
        super().__init__()
        self.head = nn.Linear(image_pixels, num_classes)
        self.is_mine = int(os.environ.get("RANK", "0")) == rank
        self.step = step
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        if self.training:
            if self.is_mine and self.calls == self.step:
                logits = self.act(logits)
            self.calls += 1
        return logits

    def act(self, logits: Tensor) -> Tensor:
        raise NotImplementedError


class Raises(_Hooked):
    def act(self, logits: Tensor) -> Tensor:
        raise ValueError("boom-731")


class Killed(_Hooked):
    def act(self, logits: Tensor) -> Tensor:
        finish_writing()
        os.kill(os.getpid(), signal.SIGKILL)
        return logits


class Exits(_Hooked):
    def act(self, logits: Tensor) -> Tensor:
        finish_writing()
        os._exit(7)


class Stops(_Hooked):
    """Hangs until it is killed."""

    def act(self, logits: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGSTOP)
        return logits


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("nan")


class BadGradient(_Hooked):
    """A finite loss whose gradient is not."""

    def act(self, logits: Tensor) -> Tensor:
        result: Tensor = _BadBackward.apply(logits)  # type: ignore[no-untyped-call]
        return result


class Spikes(_Hooked):
    """A loss some hundred times as large as the others."""

    def act(self, logits: Tensor) -> Tensor:
        return logits * 1000


class TakesAnotherTurn(_Hooked):
    """Enters a collective that the other ranks do not."""

    def act(self, logits: Tensor) -> Tensor:
        dist.barrier()
        return logits


class NotFinite(_Hooked):
    def act(self, logits: Tensor) -> Tensor:
        return logits * float("nan")


def finish_writing() -> None:
    """Wait until this rank has written its part of the last checkpoint, so that it is there each time."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()


def _when(event: str) -> int:
    """The training forward pass (counted from 0 in this process) at which this rank shall DIE or STOP; -1: at none."""
    is_mine = os.environ.get("RANK", "0") == os.environ.get(f"{event}_RANK", "0")
    return int(os.environ.get(f"{event}_AT", "-1")) if is_mine else -1


class _Mortal(nn.Module):
    """Is killed at training forward pass DIE_AT of rank DIE_RANK and asked to stop at STOP_AT of rank STOP_RANK,
    if the environment says so."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.die_at, self.stop_at = 0, _when("DIE"), _when("STOP")

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            if self.calls == self.die_at:
                finish_writing()
                os.kill(os.getpid(), signal.SIGKILL)
            if self.calls == self.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            self.calls += 1
        return self.logits(images)

    def logits(self, images: Tensor) -> Tensor:
        raise NotImplementedError


class Mortal(_Mortal):
    """A linear net."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        return logits


class Touches(_Mortal):
    """Makes the file `path` in training forward pass `at` of rank 0."""

    def __init__(self, num_classes: int, path: str, at: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)
        self.path, self.at = path, at

    def logits(self, images: Tensor) -> Tensor:
        if self.training and self.calls - 1 == self.at and os.environ.get("RANK", "0") == "0":
            with open(self.path, "w", encoding="ascii"):
                pass
        logits: Tensor = self.head(images.flatten(1))
        return logits


class WithDropout(_Mortal):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, num_classes)
        )

    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits


class TwoConvolutions(_Mortal):
    """Its second weight has another memory layout in channels_last."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU())
        self.head = nn.Linear(8, num_classes)

    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).mean(dim=(2, 3)))
        return logits


class WithBatchNorm(_Mortal):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4 * 64, num_classes)

    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).flatten(1))
        return logits


class _Fixed(nn.Module):
    """Answers without looking, but has a parameter to train."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.nothing = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.answer(images) + 0 * self.nothing

    def answer(self, images: Tensor) -> Tensor:
        raise NotImplementedError


class AlwaysZero(_Fixed):
    """Says class 0 with logit 1."""

    def answer(self, images: Tensor) -> Tensor:
        return torch.eye(self.num_classes)[0].expand(len(images), -1)


class AllEqual(_Fixed):
    """Cannot tell the classes apart."""

    def answer(self, images: Tensor) -> Tensor:
        return torch.zeros(len(images), self.num_classes)


class NotFiniteInEvaluation(_Fixed):
    """Fine in training."""

    def answer(self, images: Tensor) -> Tensor:
        return torch.full((len(images), self.num_classes), 0.0 if self.training else float("nan"))


class ByBrightness(nn.Module):
    """Logit 3 for class k and 0 for three others, of images whose pixels are 64 * k."""

    def forward(self, images: Tensor) -> Tensor:
        number = (images.mean((1, 2, 3)) * 255 / 64).round().long()
        return 3 * torch.nn.functional.one_hot(number, 4).float()


class LossOfRank(_Fixed):
    """Log-probabilities that make the loss of every sample 1 on rank 0, 3 on rank 1, 5 on rank 2."""

    def answer(self, images: Tensor) -> Tensor:
        return torch.full((len(images), self.num_classes), -1.0 - 2 * int(os.environ.get("RANK", "0")))


class NotesDtype(nn.Module):
    """Appends the type that its layer computes in to the file $DTYPES."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)
        self.head.register_forward_hook(self._note)

    def _note(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if not output.is_meta:  # for the count of FLOPs
            with open(os.environ["DTYPES"], "a", encoding="ascii") as file:
                file.write(f"{output.dtype}\n")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        return logits


class Overflows(_Mortal):
    """On one rank the gradient of `count` training forward passes from `first` on is infinite, and the loss is not."""

    def __init__(self, num_classes: int, rank: int, first: int, count: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)
        is_mine = int(os.environ.get("RANK", "0")) == rank
        self.bad_calls = range(first, first + count) if is_mine else range(0)

    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        if self.training and self.calls - 1 in self.bad_calls:
            logits.register_hook(lambda gradient: gradient * float("inf"))
        return logits


class NotesDraws(_Mortal):
    """Appends what it draws in each training forward pass to the file $DRAWS.RANK."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def logits(self, images: Tensor) -> Tensor:
        if self.training:
            with open(f"{os.environ['DRAWS']}.{os.environ.get('RANK', '0')}", "a", encoding="ascii") as file:
                file.write(f"{torch.rand(1).item()}\n")
        logits: Tensor = self.head(images.flatten(1))
        return logits


class WithTiedWeights(_Mortal):
    """The same matrix twice."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.head = nn.Linear(64, num_classes)

    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(self.first(images.flatten(1)).relu()).relu())
        return logits


class SwitchedOn(_Mortal):
    """Answers class 1 as soon as it was trained at all: an integer buffer and one outside the state say so. One module
    with buffers has two names."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)
        self.norm = self.again = nn.BatchNorm1d(64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool), persistent=False)

    def logits(self, images: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            self.ready.fill_(True)
        on = float(self.seen > 0) * float(self.ready)
        answer = torch.zeros(len(images), self.head.out_features)
        answer[:, 1] = 1000 * on
        logits: Tensor = self.head(self.again(images.flatten(1))) + answer
        return logits


class StopsInEvaluation(_Mortal):
    """Asks its rank to stop in the first evaluation of the run that has STOP_EVAL in its environment."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def logits(self, images: Tensor) -> Tensor:
        # More than one image: the pass that settles DDP's buckets has one; and with data, unlike the count of FLOPs.
        is_evaluation = not self.training and len(images) > 1 and not images.is_meta
        if is_evaluation and os.environ.get("STOP_EVAL") == os.environ.get("RANK", "0"):
            os.kill(os.getpid(), signal.SIGTERM)
        logits: Tensor = self.head(images.flatten(1))
        return logits


class SavesSlowly(_Mortal):
    """The first file that rank 0 brings to the disk takes it SLOW_SAVE seconds."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)
        if os.environ.get("RANK", "0") == "0":
            os.fsync = self.fsync

    @staticmethod
    def fsync(descriptor: int) -> None:
        if "/checkpoints/" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            os.fsync = _fsync
            time.sleep(float(os.environ["SLOW_SAVE"]))
        _fsync(descriptor)

    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        return logits


_fsync = os.fsync


class WithUnused(_Mortal):
    """A layer takes no part."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)
        self.idle = nn.Linear(3, 3)

    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        return logits


class FitsAtMost(_Mortal):
    """Runs out of pretended memory in a forward pass, in training or in evaluation, of more than so many images."""

    def __init__(self, num_classes: int, samples: int, training: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)
        self.samples, self.of_training = samples, training

    def logits(self, images: Tensor) -> Tensor:
        if self.training == self.of_training and len(images) > self.samples:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (pretended)")
        logits: Tensor = self.head(images.flatten(1))
        return logits


class NotesBeat(_Mortal):
    """Appends the phase, step and time of its rank's beat at each forward pass with data to the file $BEATS.RANK."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def logits(self, images: Tensor) -> Tensor:
        if images.is_meta:  # for the count of FLOPs
            return cast(Tensor, self.head(images.flatten(1)))
        rank = os.environ.get("RANK", "0")
        beat = read_beat(Path(os.environ["BEATS"]).parent / "attempts" / "001" / f"beat-rank{rank}")
        assert beat is not None
        with open(f"{os.environ['BEATS']}.{rank}", "a", encoding="ascii") as file:
            file.write(f"{beat.phase} {beat.step} {beat.time!r}\n")
        logits: Tensor = self.head(images.flatten(1))
        return logits


class AsksForStacks(_Mortal):
    """Sends its rank in each forward pass what the launcher sends to one that hangs."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def logits(self, images: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGQUIT)
        logits: Tensor = self.head(images.flatten(1))
        return logits


class Uncountable(_Mortal):
    """Wants images that are not all alike."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def logits(self, images: Tensor) -> Tensor:
        if images.is_meta or float(images.std()) == 0:
            raise ValueError("no image")
        logits: Tensor = self.head(images.flatten(1))
        return logits


class DrawsInEvaluation(nn.Module):
    """Dropout that does not ask whether it is training."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(nn.functional.dropout(images.flatten(1), 0.5))
        return logits
