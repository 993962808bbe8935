"""The settings of `data`."""

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from configs.known_data import IMAGE_FOLDER
from configs.values import Auto, Count, CountOrZero, OpenFraction, PerChannel, Range, Section, data_name

OF_IMAGE_FOLDERS = ("val_fraction", "image_size", "resize_size", "channels", "on_bad_image", "max_bad_images")
"""Settings of `data` that have no meaning for other data sets."""


class AugmentConfig(Section):
    """Random changes of training images, keyed by (seed, epoch, sample): the same on any number of processes."""

    shift: CountOrZero = Field(
        default=0, description="move each image by up to this many pixels in x and y, filled with zeros"
    )
    flip: bool = Field(default=False, description="mirror left-right with probability 1/2")
    cutout: CountOrZero = Field(default=0, description="side in pixels of one square set to the mean; 0 = none")
    crop_scale: Range | None = Field(
        default=(0.08, 1.0),
        description="with data.image_size: share of an image's area that a random crop keeps; null: the middle, as in "
        "evaluation",
    )
    crop_ratio: Range = Field(
        default=(3 / 4, 4 / 3),
        description="with data.image_size: width to height of a random crop, which is then a square",
    )

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for name, most in (("crop_scale", 1.0), ("crop_ratio", math.inf)):
            low, high = getattr(self, name) or (1.0, 1.0)
            if not 0 < low <= high <= most:
                limit = "" if most == math.inf else f" up to {most:g}"
                raise ValueError(f"{name}: [{low:g}, {high:g}] is not a range of positive numbers{limit}")
        return self


class DataConfig(Section):
    """The data set and where its batches are made."""

    name: Annotated[str, AfterValidator(data_name)] = Field(
        default="mnist",
        description="mnist, fashion_mnist, cifar10, cifar100, imagefolder, or module:callable (train: bool) -> Dataset",
    )
    root: str = Field(
        default="data",
        description="folder of the data sets, relative to where the command is run; for imagefolder the one that holds "
        "train/ and val/, with a folder of images for each class in both",
    )
    mirror: str | None = Field(
        default=None, description="URL to download the data set's files from, instead of its own site"
    )
    residency: Literal["auto", "device", "stream"] = Field(
        default="auto", description="device: the whole set as one uint8 tensor on the device; stream: through workers"
    )
    num_workers: CountOrZero | Auto = Field(
        default="auto",
        description="loader processes per rank when streaming; auto: 2 on a CPU, whose cores compute; "
        "on GPUs cores / local ranks - 1, from 1 to 8",
    )
    num_classes: Count | None = Field(
        default=None, description="classes of a module:callable data set; known for the built-in ones"
    )
    val_fraction: OpenFraction | None = Field(
        default=None,
        description="imagefolder: data.root holds the classes itself, and this share of each is kept for evaluation, "
        "chosen by a hash of the file's path",
    )
    image_size: Count | None = Field(
        default=None,
        description="imagefolder: side in pixels of the square that an image becomes; null: images stay as they are",
    )
    resize_size: Count | None = Field(
        default=None,
        description="imagefolder: pixels of the shorter side, of which evaluation sees the middle; default: 8/7 of "
        "image_size",
    )
    channels: Literal[1, 3] = Field(default=3, description="imagefolder: 3 reads images as RGB, 1 as grey")
    on_bad_image: Literal["fail", "skip"] = Field(
        default="fail",
        description="imagefolder, when an image cannot be decoded: fail, naming it; or take the next one that can be, "
        "and list it in bad_images.txt",
    )
    max_bad_images: CountOrZero = Field(
        default=100, description="on_bad_image: skip gives up when it is more than these"
    )
    mean: PerChannel | None = Field(
        default=None, description="per channel, of pixels in [0, 1]; default: the data set's own"
    )
    std: PerChannel | None = Field(
        default=None, description="per channel, of pixels in [0, 1]; default: the data set's own"
    )
    augment: AugmentConfig = AugmentConfig()

    @model_validator(mode="after")
    def _for_image_folders(self) -> Self:
        given = [name for name in OF_IMAGE_FOLDERS if getattr(self, name) != type(self).model_fields[name].default]
        if given and self.name != IMAGE_FOLDER:
            raise ValueError(f"{', '.join(given)}: only for name: {IMAGE_FOLDER}, and name is {self.name}")
        if self.resize_size is not None and self.resize_size < (self.image_size or math.inf):
            raise ValueError(f"resize_size is {self.resize_size} and needs an image_size that is no larger")
        crops = self.augment.crop_scale, self.augment.crop_ratio
        if self.image_size is None and crops != (AugmentConfig().crop_scale, AugmentConfig().crop_ratio):
            raise ValueError("augment.crop_scale and augment.crop_ratio need image_size")
        if self.image_size is not None and self.residency == "device" and self.augment.crop_scale is not None:
            raise ValueError(
                "residency: device would keep one random crop of each image for the whole run; use residency: stream, "
                "or augment.crop_scale: null"
            )
        if self.name == IMAGE_FOLDER and self.mean is not None and len(self.mean) not in (1, self.channels):
            raise ValueError(f"mean has {len(self.mean)} channels and the images have channels: {self.channels}")
        return self

    @model_validator(mode="after")
    def _mean_and_std(self) -> Self:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std are given together or not at all")
        if self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels and std {len(self.std)}")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std must be positive, got {list(self.std)}")
        return self
