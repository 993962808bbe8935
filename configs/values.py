"""The kinds of values that settings take: ranges, spellings, names."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from configs.known_data import IMAGE_FOLDER, KNOWN_DATA
from configs.known_models import BUILT_IN_MODELS, TORCHVISION_MODELS

FP32_SPELLINGS = ("no", "off", "false", "fp32", "none")


def whole(value: Any) -> Any:
    """YAML reads `1e3` as a float; a float that is a whole number is accepted where an integer is wanted."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError(
            f"{value} is not a power of two; use {1 << (value.bit_length() - 1)} or {1 << value.bit_length()}"
        )
    return value


def precision(value: Any) -> Any:
    spelling = "no" if value is None or value is False else str(value).lower()
    return "no" if spelling in FP32_SPELLINGS else spelling


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the choice nearest to `word`, or nothing where none is near."""
    near = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""


def _is_own(name: str) -> bool:
    """Whether it is `module:callable` of the user's own."""
    module, _, attribute = name.partition(":")
    return bool(module and attribute)


def data_name(name: str) -> str:
    known = (*KNOWN_DATA, IMAGE_FOLDER)
    if name in known or _is_own(name):
        return name
    raise ValueError(
        f"'{name}' is unknown (expected one of {', '.join(known)}, or module:callable){did_you_mean(name, known)}"
    )


def model_name(name: str) -> str:
    known = (*BUILT_IN_MODELS, *TORCHVISION_MODELS)
    if name in known or name.startswith(("torchvision/", "timm/")) or _is_own(name):
        return name
    raise ValueError(
        f"'{name}' is unknown (expected one of {', '.join(BUILT_IN_MODELS)}, a network of torchvision's, timm/NAME or "
        f"module:callable){did_you_mean(name, known)}"
    )


def weights_name(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() == "none" else value


def is_published(weights: str) -> bool:
    """Whether `weights` names what a library publishes, such as IMAGENET1K_V2, and not a file."""
    return weights == "default" or (weights.replace("_", "").isalnum() and weights.isupper())


Count = Annotated[int, Field(ge=1), BeforeValidator(whole)]
CountOrZero = Annotated[int, Field(ge=0), BeforeValidator(whole)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
OpenFraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
PerChannel = Annotated[tuple[Finite, ...], Field(min_length=1), BeforeValidator(as_tuple)]
Range = Annotated[tuple[Finite, Finite], BeforeValidator(as_tuple)]
Precision = Annotated[Literal["auto", "no", "fp16", "bf16"], BeforeValidator(precision)]
Auto = Literal["auto"]


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_default=True)
