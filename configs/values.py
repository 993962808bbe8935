"""The kinds of values that settings take: ranges, spellings, names."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from configs.known_data import ENCODED, KNOWN_DATA
from configs.known_models import BUILT_IN_MODELS, TIMM, TORCHVISION, TORCHVISION_MODELS

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


def _known_or_own(name: str, known: Iterable[str], also: str, more: Iterable[str] = ()) -> str:
    """A built-in name, one of `more`, which are too many to be listed, or `module:callable` of the user's own."""
    module, _, attribute = name.partition(":")
    if name in known or name in more or (module and attribute):
        return name
    near = did_you_mean(name, (*known, *more))
    raise ValueError(f"'{name}' is unknown (expected one of {', '.join(known)}, {also}){near}")


def data_name(name: str) -> str:
    return _known_or_own(name, (*KNOWN_DATA, *ENCODED), "or module:callable")


def model_name(name: str) -> str:
    if name.startswith((TORCHVISION, TIMM)):
        return name
    also = "a network of torchvision, torchvision/NAME, timm/NAME or module:callable"
    return _known_or_own(name, BUILT_IN_MODELS, also, TORCHVISION_MODELS)


def one_or_more(value: Any) -> Any:
    """A list, or its only item."""
    return (value,) if isinstance(value, str) else as_tuple(value)


def weights_name(value: Any) -> Any:
    return "none" if value is None else value


Count = Annotated[int, Field(ge=1), BeforeValidator(whole)]
CountOrZero = Annotated[int, Field(ge=0), BeforeValidator(whole)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
OpenFraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
PerChannel = Annotated[tuple[Finite, ...], Field(min_length=1), BeforeValidator(as_tuple)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(one_or_more)]
Range = Annotated[tuple[Finite, Finite], BeforeValidator(as_tuple)]
Precision = Annotated[Literal["auto", "no", "fp16", "bf16"], BeforeValidator(precision)]
Auto = Literal["auto"]


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_default=True)
