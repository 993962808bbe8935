"""Encoded images as a data set."""

import errno
from itertools import chain

from torch import Tensor

from configs.data_section import DataConfig
from configs.errors import EnvironmentProblem, TrainingError
from configs.text import printable
from trainer.data.bad_images import BadImages
from trainer.data.crops import centre_view, random_view
from trainer.data.decode import DecodingError, View, read_pixels, whole
from trainer.data.encoded import Encoded
from trainer.data.order import key_of
from trainer.data.streams import Stream

TRAINING, EVALUATION = "training", "evaluation"
"""The names of the splits."""


class ImageSplit:
    """One split; sample i is image i, in the order that `files` have."""

    def __init__(self, files: Encoded, name: str, config: DataConfig, bad: BadImages | None = None) -> None:
        self.files, self.name = files, name
        self.config = config
        self.bad = bad
        """Where an image that cannot be decoded is listed; None: it is an error."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.sample(0, 0, index)

    def unaugmented(self) -> "ImageSplit":
        """The same images as an evaluation would see them, in the size of training."""
        config = self.config.model_copy(update={"eval_image_size": None})
        return ImageSplit(self.files, EVALUATION, config, self.bad)

    def sample(self, seed: int, epoch: int, draw: int, side: int | None = None) -> tuple[Tensor, int]:
        """The image, uint8 (channels, H, W), and its class; a random crop is that of (seed, epoch, draw),
        where draw is the index, or that plus a multiple of the number of images: see RankBatch.draws. With `side` it
        has so many pixels in place of data.image_size.

        In place of one that cannot be decoded it is the first after it that can be, from the last on to the first: the
        same one whoever reads it, and as often as it is read.
        """
        view, bad, index = self._view(seed, epoch, draw, side), list[tuple[str, str]](), draw % len(self)
        for number in chain(range(index, len(self)), range(index)):
            path = self.files.path(number)
            try:
                pixels = self._read(number, path, view)
            except DecodingError as error:
                if self.bad is None:
                    raise TrainingError(
                        f"{printable(path)} (sample {number} of the {self.name} split) cannot be decoded: {error}; "
                        "repair it, take it away, or set data.on_bad_image=skip"
                    ) from error
                bad.append((path, str(error)))
            else:
                self._list(bad, path)
                return pixels, int(self.files.labels[number])
        self._list(bad, "nothing")
        raise TrainingError(f"none of the {len(self)} images of the {self.name} split can be decoded")

    def _list(self, bad: list[tuple[str, str]], instead: str) -> None:
        for path, why in bad:
            assert self.bad is not None
            self.bad.add(path, why, instead)

    def _view(self, seed: int, epoch: int, draw: int, side: int | None) -> View:
        config, augment = self.config, self.config.augment
        side, interpolation = side or config.image_size, config.interpolation
        if side is None:
            return whole
        if interpolation == "random":
            is_drawn = self.name == TRAINING and key_of(seed, epoch, Stream.INTERPOLATION, draw) % 2
            interpolation = "bilinear" if is_drawn else "bicubic"
        if self.name == TRAINING and augment.crop_scale is not None:
            key = key_of(seed, epoch, Stream.CROP, draw)
            return random_view(key, side, augment.crop_scale, augment.crop_ratio, interpolation)
        seen = config.eval_image_size or config.image_size
        if self.name == EVALUATION:
            side = seen or side
        resize = config.resize_size or round(side * 8 / 7)
        if self.name == TRAINING and config.resize_size is not None and seen is not None:
            resize = max(side, round(side * config.resize_size / seen))
        return centre_view(side, resize, interpolation)

    def _read(self, index: int, path: str, view: View) -> Tensor:
        try:
            return read_pixels(self.files.open(index), self.config.channels, view)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            # Not the image's fault, and perhaps gone in a minute: another in its place would be another training.
            raise EnvironmentProblem(f"cannot read {printable(path)}: {error.strerror}; look at the disk") from error
