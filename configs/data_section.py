"""The settings of `data`."""

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from configs.known_data import IMAGE_FOLDER
from configs.values import (
    Auto,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    OpenFraction,
    PerChannel,
    Range,
    Section,
    as_tuple,
    data_name,
    whole,
)

OF_IMAGE_FOLDERS = (
    "val_fraction",
    "image_size",
    "eval_image_size",
    "resize_size",
    "channels",
    "on_bad_image",
    "max_bad_images",
)
"""Settings of `data` that have no meaning for other data sets."""

Jitter = Annotated[tuple[NonNegative, ...], Field(min_length=3, max_length=4), BeforeValidator(as_tuple)]


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

    policy: Literal["none", "autoaugment", "randaugment", "trivialaugment", "augmix"] = Field(
        default="none", description="torchvision's policy of that name, on each training image in the loader worker"
    )
    policy_ops: Count = Field(default=2, description="randaugment: changes of each image")
    policy_magnitude: Annotated[int, Field(ge=0, le=30), BeforeValidator(whole)] = Field(
        default=9, description="randaugment: how strong they are, 0 to 30"
    )
    color_jitter: Jitter | None = Field(
        default=None,
        description="how far brightness, contrast, saturation and hue (at most 0.5) may change, as [0.4, 0.4, 0.4]",
    )
    erasing: Fraction = Field(
        default=0.0, description="probability that a random rectangle of a training image is set to the mean"
    )
    repeats: Count = Field(
        default=1,
        description="repeated augmentation: so many copies of an image in a row, each changed in its own way",
    )
    mixup: NonNegative = Field(
        default=0.0, description="alpha of the Beta distribution by which images are mixed in pairs; 0: no mixup"
    )
    cutmix: NonNegative = Field(default=0.0, description="the same for boxes of one image in another; 0: no CutMix")
    mix_probability: Fraction = Field(default=1.0, description="mixup and cutmix: share of the batches that are mixed")
    mix_switch: Fraction = Field(default=0.5, description="share of cutmix where there is mixup too")

    @property
    def changes_single_images(self) -> bool:
        """Whether loader workers have to, which is one image after the other."""
        return self.policy != "none" or self.color_jitter is not None or self.erasing > 0

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    @model_validator(mode="after")
    def _jitter(self) -> Self:
        if self.color_jitter is not None and len(self.color_jitter) == 4 and self.color_jitter[3] > 0.5:
            raise ValueError(f"color_jitter: a hue of {self.color_jitter[3]:g} is more than 0.5, all the way around")
        return self

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
    eval_image_size: Count | None = Field(
        default=None, description="imagefolder: the side in evaluation, where it is not image_size"
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
    sampling: Literal["shuffled", "balanced", "weighted"] = Field(
        default="shuffled",
        description="each sample once an epoch; or with replacement: every class equally often, or by sampling_weights",
    )
    sampling_weights: Annotated[tuple[NonNegative, ...], BeforeValidator(as_tuple)] | str | None = Field(
        default=None,
        description="weighted: a number for each class, or a text file with a number a line for each training sample",
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
        if self.eval_image_size is not None and self.image_size is None:
            raise ValueError("eval_image_size needs image_size")
        seen = self.eval_image_size or self.image_size or math.inf
        if self.resize_size is not None and self.resize_size < seen:
            raise ValueError(f"resize_size is {self.resize_size} and needs an image_size that is no larger")
        crops = self.augment.crop_scale, self.augment.crop_ratio
        if self.image_size is None and crops != (AugmentConfig().crop_scale, AugmentConfig().crop_ratio):
            raise ValueError("augment.crop_scale and augment.crop_ratio need image_size")
        if self.image_size is not None and self.residency == "device" and self.augment.crop_scale is not None:
            raise ValueError(
                "residency: device would keep one random crop of each image for the whole run; use residency: stream, "
                "or augment.crop_scale: null"
            )
        if self.residency == "device" and self.augment.changes_single_images:
            raise ValueError(
                "residency: device has no workers for augment.policy, color_jitter and erasing; use residency: stream"
            )
        if self.name == IMAGE_FOLDER and self.mean is not None and len(self.mean) not in (1, self.channels):
            raise ValueError(f"mean has {len(self.mean)} channels and the images have channels: {self.channels}")
        return self

    @model_validator(mode="after")
    def _one_sampling(self) -> Self:
        if (self.sampling == "weighted") != (self.sampling_weights is not None):
            raise ValueError("sampling: weighted and sampling_weights go together")
        if self.sampling != "shuffled" and self.augment.repeats > 1:
            raise ValueError("augment.repeats goes with sampling: shuffled, where each image comes by once otherwise")
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
