"""The settings of `data.augment`."""

import math
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from configs.values import Count, CountOrZero, Fraction, NonNegative, Range, Section, as_tuple, whole

Jitter = Annotated[tuple[NonNegative, ...], Field(min_length=3, max_length=4), BeforeValidator(as_tuple)]


class AugmentConfig(Section):
    """Random changes of training images, keyed by (seed, epoch, sample): the same on any number of processes."""

    shift: CountOrZero = Field(default=0, description="move each image by up to this many pixels in x and y")
    shift_padding: Literal["zeros", "reflect"] = Field(default="zeros", description="shift: what comes in at the edge")
    flip: bool | Literal["alternating"] = Field(
        default=False,
        description="mirror left-right with probability 1/2; alternating: in every other epoch, so that each image is "
        "seen both ways in turn",
    )
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
    policy_magnitude_std: NonNegative = Field(
        default=0.0, description="randaugment: standard deviation of the magnitude, drawn anew for each change"
    )
    policy_probability: Fraction = Field(default=1.0, description="randaugment: share of the changes that are made")
    color_jitter: Jitter | None = Field(
        default=None,
        description="how far brightness, contrast, saturation and hue (at most 0.5) may change, as [0.4, 0.4, 0.4]",
    )
    erasing: Fraction = Field(
        default=0.0, description="probability that a random rectangle of a training image is erased"
    )
    erasing_mode: Literal["mean", "noise"] = Field(
        default="mean", description="what comes in its place; noise: normal, for each value, timm's mode pixel"
    )
    repeats: Count = Field(
        default=1,
        description="repeated augmentation: so many copies of an image in a row, each changed in its own way",
    )
    mixup: NonNegative = Field(
        default=0.0, description="alpha of the Beta distribution by which images are mixed in pairs; 0: no mixup"
    )
    cutmix: NonNegative = Field(default=0.0, description="the same for boxes of one image in another; 0: no CutMix")
    mix_probability: Fraction = Field(default=1.0, description="mixup and cutmix: share of the pairs that are mixed")
    mix_switch: Fraction = Field(default=0.5, description="share of cutmix where there is mixup too")

    @property
    def changes_single_images(self) -> bool:
        """Whether loader workers have to, which is one image after the other."""
        return self.policy != "none" or self.color_jitter is not None

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    @property
    def unit(self) -> int:
        """How many samples of a batch are never parted: partners."""
        return 2 if self.mixes else 1

    @model_validator(mode="after")
    def _used(self) -> Self:
        needs = {
            "policy_ops, policy_magnitude, policy_magnitude_std and policy_probability need policy: randaugment": (
                self.policy == "randaugment",
                ("policy_ops", "policy_magnitude", "policy_magnitude_std", "policy_probability"),
            ),
            "shift_padding needs shift": (self.shift > 0, ("shift_padding",)),
            "erasing_mode needs erasing": (self.erasing > 0, ("erasing_mode",)),
            "mix_probability needs mixup or cutmix": (self.mixes, ("mix_probability",)),
            "mix_switch needs mixup and cutmix": (self.mixup > 0 and self.cutmix > 0, ("mix_switch",)),
        }
        for what, (is_there, names) in needs.items():
            if not is_there and any(getattr(self, name) != type(self).model_fields[name].default for name in names):
                raise ValueError(what)
        return self

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
