"""The settings of `data`."""

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from configs.augment_section import AugmentConfig
from configs.hugging_face import HuggingFaceConfig
from configs.known_data import ENCODED, HUGGING_FACE
from configs.values import (
    Auto,
    Count,
    CountOrZero,
    NonNegative,
    OpenFraction,
    PerChannel,
    Section,
    as_tuple,
    data_name,
)

OF_ENCODED_IMAGES = (
    "val_fraction",
    "image_size",
    "eval_image_size",
    "resize_size",
    "image_sizes",
    "progressive",
    "interpolation",
    "channels",
    "on_bad_image",
    "max_bad_images",
)
"""Settings of `data` that only data sets of encoded images take."""


class ProgressiveConfig(Section):
    """Training images that grow to data.image_size, in steps of 32 pixels."""

    start_size: Count | None = Field(
        default=None, description="images: side of the first training images, which grow to image_size; null: off"
    )
    from_epoch: CountOrZero = Field(default=0, description="progressive: the last epoch of start_size, from 0 on")
    until_epoch: Count = Field(default=1, description="progressive: the first epoch of image_size")

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        if self.start_size is None and (self.from_epoch, self.until_epoch) != (0, 1):
            raise ValueError("from_epoch and until_epoch need start_size")
        if self.from_epoch >= self.until_epoch:
            raise ValueError(f"from_epoch is {self.from_epoch} and until_epoch {self.until_epoch}, which is no later")
        return self


class DataConfig(Section):
    """The data set and where its batches are made."""

    name: Annotated[str, AfterValidator(data_name)] = Field(
        default="mnist",
        description="mnist, fashion_mnist, cifar10, cifar100; images: imagefolder, webdataset, huggingface; or "
        "module:callable (train: bool) -> Dataset",
    )
    root: str = Field(
        default="data",
        description="folder of the data sets, relative to where the command is run; of images the one that "
        "holds train/ and val/, with a folder for each class, or tar files, in both",
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
        description="imagefolder, webdataset: data.root is not parted yet, and this share of each class is kept for "
        "evaluation, chosen by a hash of the image's name",
    )
    image_size: Count | None = Field(
        default=None,
        description="images: side in pixels of the square that an image becomes; null: images stay as they are",
    )
    eval_image_size: Count | None = Field(
        default=None, description="images: the side in evaluation, where it is not image_size"
    )
    resize_size: Count | None = Field(
        default=None,
        description="images: pixels of the shorter side, of which evaluation sees the middle; default: 8/7 of "
        "image_size",
    )
    image_sizes: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = Field(
        default=(),
        description="images: sides of training images, one drawn for each batch; evaluation sees image_size or "
        "eval_image_size",
    )
    huggingface: HuggingFaceConfig = HuggingFaceConfig()
    progressive: ProgressiveConfig = ProgressiveConfig()
    interpolation: Literal["bilinear", "bicubic", "random"] = Field(
        default="bilinear",
        description="images: how images are resized, always antialiased; random: either for each training image, "
        "bicubic in evaluation",
    )
    channels: Literal[1, 3] = Field(default=3, description="images: 3 reads images as RGB, 1 as grey")
    on_bad_image: Literal["fail", "skip"] = Field(
        default="fail",
        description="images, when an image cannot be decoded: fail, naming it; or take the next one that can be, "
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
        given = [name for name in OF_ENCODED_IMAGES if getattr(self, name) != type(self).model_fields[name].default]
        if given and self.name not in ENCODED:
            raise ValueError(f"{', '.join(given)}: only for name: {' or '.join(ENCODED)}, and name is {self.name}")
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
                "residency: device has no workers for augment.policy and color_jitter; use residency: stream"
            )
        if self.name in ENCODED and self.mean is not None and len(self.mean) not in (1, self.channels):
            raise ValueError(f"mean has {len(self.mean)} channels and the images have channels: {self.channels}")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.name != HUGGING_FACE and self.huggingface != HuggingFaceConfig():
            raise ValueError(f"huggingface: only for name: {HUGGING_FACE}, and name is {self.name}")
        if self.name == HUGGING_FACE and self.huggingface.path is None:
            raise ValueError("name: huggingface needs huggingface.path, a folder or a name on the hub")
        if self.name == HUGGING_FACE and self.val_fraction is not None:
            raise ValueError("name: huggingface takes huggingface.eval_split (train[90%:]) in place of val_fraction")
        return self

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        start = self.progressive.start_size
        if start is None and not self.image_sizes:
            return self
        if start is not None and self.image_sizes:
            raise ValueError("progressive.start_size and image_sizes are two ways to other sizes; give one")
        what = "progressive.start_size" if start is not None else "image_sizes"
        if self.image_size is None:
            raise ValueError(f"{what} needs image_size")
        if start is not None and start >= self.image_size:
            raise ValueError(f"progressive.start_size is {start} and needs an image_size that is more")
        if self.residency == "device":
            raise ValueError(f"residency: device holds images of one size, not {what}; use residency: stream")
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
