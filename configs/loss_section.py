"""The settings of `loss`."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from configs.values import Fraction, NonNegative, Positive, Section, as_tuple


class LossConfig(Section):
    """The loss, a mean over the samples of the global batch."""

    name: Literal["cross_entropy", "nll", "bce"] = Field(
        default="cross_entropy", description="nll takes log-probabilities; bce: each class a yes or no of its own"
    )
    label_smoothing: Fraction = Field(
        default=0.0, description="share of the target spread evenly over all classes; in training only"
    )
    class_weights: Annotated[tuple[NonNegative, ...], BeforeValidator(as_tuple)] | Literal["balanced"] | None = Field(
        default=None,
        description="what a sample of each class counts in training, a number for each; balanced: all classes the same",
    )
    bce_target_threshold: Fraction | None = Field(
        default=None, description="bce: shares of a mixed target above this count as a yes, others as a no"
    )
    bce_sum: bool = Field(default=False, description="bce: the sum over the classes, not their mean")
    teacher: str | None = Field(
        default=None, description="folder of a finished run whose network training follows too (distillation)"
    )
    teacher_weight: Fraction = Field(default=0.5, description="teacher: its share of the loss")
    teacher_temperature: Positive = Field(
        default=1.0, description="teacher: what logits are divided by; higher shows more of the unlikely classes"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.name != "bce" and (self.bce_sum or self.bce_target_threshold is not None):
            raise ValueError("bce_sum and bce_target_threshold need name: bce")
        if self.name == "nll" and self.label_smoothing:
            raise ValueError("label_smoothing is for cross_entropy and bce; nll would leave it out")
        if self.teacher is None and (self.teacher_weight, self.teacher_temperature) != (0.5, 1.0):
            raise ValueError("teacher_weight and teacher_temperature need a teacher")
        if self.teacher is not None and self.name == "bce":
            raise ValueError("a teacher gives shares of all classes; use name: cross_entropy or nll, not bce")
        return self
