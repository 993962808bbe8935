"""What a knob takes and what may have been meant, in plain words."""

from difflib import SequenceMatcher
from functools import cache
from typing import Any

from pydantic_core import ErrorDetails

from configs.plain_yaml import flow
from configs.schema import KNOBS, SECTIONS
from configs.values import Section, did_you_mean

# What other trainers call it, where the nearest name by letters is another knob.
HABITS = {"batch_size": "global_batch_size", "learning_rate": "optim.lr", "amp": "mixed_precision"}
TRUTH = {"yes": "true", "on": "true", "no": "false", "off": "false"}
RANGE_ERRORS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")
KINDS = {
    "integer": ("a whole number", "a whole number"),
    "number": ("a number", "a number"),
    "string": ("text", "text, in quotes where it looks like a number"),
    "array": ("a list of numbers", "one or more numbers in brackets, such as [0.5]"),
}


def show(value: Any) -> str:
    """A value as the user might have written it, cut if it is long; text stands in quotes."""
    text = repr(value) if isinstance(value, str) else flow(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def explain(key: str, value: Any, error: ErrorDetails) -> str:
    """Why pydantic refused `value` for the knob `key`."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    schema = _json_schema(KNOBS[key])["properties"][_last(key)]
    taken = next(kind for kind in schema.get("anyOf", [schema]) if kind["type"] != "null")
    if "$ref" in taken.get("items", {}):
        at = f" at {'.'.join(map(str, error['loc'][1:]))}" if error["loc"][1:] else ""
        return f"{show(value)} cannot be used{at}: {error['msg']} (expected such as [{{kind: exit, rank: 1, step: 7}}])"
    others = [kind.get("const", "null") for kind in schema.get("anyOf", [schema])[1:]]
    or_null = "".join(f", or {other}" for other in others)
    choices = ["true", "false"] if taken["type"] == "boolean" else taken.get("enum")
    if choices:
        nearest = did_you_mean(TRUTH.get(value, value), [*choices, *others]) if isinstance(value, str) else ""
        return f"{show(value)} is unknown (expected one of {', '.join(choices)}{or_null}){nearest}"
    kind, expected = KINDS[taken["type"]]
    fault = "out of range" if error["type"] in RANGE_ERRORS and taken["type"] != "array" else f"not {kind}"
    return f"{show(value)} is {fault} (expected {expected}{_range(taken)}{or_null})"


@cache
def _json_schema(section: type[Section]) -> dict[str, Any]:
    return section.model_json_schema()


def _range(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {low:.19g} to {high}" if isinstance(high, int) else f" from {low:g} to {high:g}"
    above = schema.get("exclusiveMinimum")
    return f" > {above:g}" if above is not None else f" >= {low:g}" if low is not None else ""


def nearest_key(key: str) -> str:
    """`; did you mean 'optim.lr'?` for a key that there is not, or nothing where none is near."""
    section, _, last = key.rpartition(".")
    names = [HABITS[last]] if last in HABITS else [name for name in (*KNOBS, *SECTIONS) if _last(name) == last]
    if not names or section:
        likeness = {name: _likeness(key, name) for name in names or (*KNOBS, *SECTIONS)}
        best = max(likeness, key=likeness.__getitem__)
        names = [best] if names or likeness[best] >= 0.65 else []
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _likeness(key: str, name: str) -> float:
    """From 0 to 1; the right word in the wrong section is nearly as good as the right place."""
    whole = SequenceMatcher(None, key, name).ratio()
    return max(whole, 0.9 * SequenceMatcher(None, _last(key), _last(name)).ratio())
