"""YAML 1.2 and `a.b=c` overrides -> RunConfig. All problems are told at once: place, value, what was expected."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from configs.errors import ConfigError
from configs.plain_yaml import YamlProblem, compose_argument, compose_file, flow, is_left_empty, line_of, plain_value
from configs.schema import AT_MOST_ONE_OF, FREE_ON_RESUME, KNOBS, ONE_OF, SECTIONS, RunConfig
from configs.text import printable
from configs.wording import explain, nearest_key, show

COMMAND_LINE = "command line"
AFTER_ALL_LINES = sys.maxsize
OPEN = "model.args"  # the one knob that is itself a mapping, of names that only the network knows


@dataclass(frozen=True)
class LoadedConfig:
    """`origins` maps the dotted name of every knob to "default", "configs/mnist.yaml:12" or "command line"."""

    config: RunConfig
    origins: dict[str, str]


class _Place(NamedTuple):
    """`configs/mnist.yaml:12`, or `command line: optim.lr=0.1`, whose line is a number after all lines."""

    line: int
    text: str

    @property
    def short(self) -> str:
        return self.text.removeprefix(f"{COMMAND_LINE}: ")

    @property
    def origin(self) -> str:
        return self.text if self.short == self.text else COMMAND_LINE

    def of(self, key: str) -> str:
        """The place and the key, without telling the key twice."""
        return self.text if self.text.startswith(f"{COMMAND_LINE}: {key}=") else f"{self.text}: {key}"


class _Entry(NamedTuple):
    """A key as it was given, and what was given for it."""

    key: str
    place: _Place
    node: Node


class _Setting(NamedTuple):
    """A plain value for a knob."""

    value: Any
    place: _Place


class _Problems(list[tuple[int, str]]):
    """What was found so far, by line."""

    def add(self, line: int, where: str, problem: str) -> None:
        self.append((line, printable(f"{where}: {problem}")))

    def add_missing(self, where: str, pair: tuple[str, str]) -> None:
        """One of the pair must be given; said unless a problem tells already that one was, but badly."""
        if not any(name in text for _, text in self for name in pair):
            self.add(AFTER_ALL_LINES, where, f"give {pair[0]} or {pair[1]}")

    def raise_if_any(self) -> None:
        if self:
            raise ConfigError(*dict.fromkeys(text for _, text in sorted(self, key=lambda problem: problem[0])))


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read `path`, apply overrides such as `optim.lr=0.1`, check it all. Raises ConfigError, a line for each problem.

    An override also replaces the file's other spelling of the same thing: max_steps=10 its max_epochs.
    `model.args={width: 64}` replaces all arguments of the network, `model.args.width=64` sets one.
    """
    problems = _Problems()
    in_file = _walk(compose_file(path).value, "", lambda name: _Place(line_of(name), f"{path}:{line_of(name)}"))
    settings = _merge(_collect(in_file, problems), _collect(_in_arguments(overrides, problems), problems))
    for pair in ONE_OF:
        if not _given(settings, pair):
            problems.add_missing(str(path), pair)
            settings[pair[0]] = _Setting(1, _Place(AFTER_ALL_LINES, str(path)))
    config = _validate(settings, problems)
    problems.raise_if_any()
    return LoadedConfig(config, dict.fromkeys(KNOBS, "default") | {key: settings[key].place.origin for key in settings})


def dump_config(config: RunConfig) -> str:
    """YAML with every knob, which load_config reads back to an equal RunConfig."""
    return "".join(_lines(config.model_dump(), ""))


def _lines(values: dict[str, Any], prefix: str) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        if prefix + name in SECTIONS:
            yield f"{indent}{name}:\n"
            yield from _lines(value, f"{prefix}{name}.")
        else:
            yield f"{indent}{name}: {flow(value)}\n"


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """`optim.lr: 0.1 -> 0.2` for each knob that differs and is not free to differ on resume."""
    before, after = _flat(old), _flat(new)
    changed = [key for key in before | after if before.get(key) != after.get(key) and not _is_free(key)]
    return [f"{key}: {before.get(key, 'unset')} -> {after.get(key, 'unset')}" for key in changed]


def _flat(config: RunConfig) -> dict[str, str]:
    """Every knob's value as YAML, those of the network's arguments one by one."""
    values: dict[str, Any] = {key: reduce(getattr, key.split("."), config) for key in KNOBS}
    values |= {f"{OPEN}.{name}": value for name, value in values.pop(OPEN).items()}
    return {key: flow(value) for key, value in values.items()}


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE_ON_RESUME)


def _in_arguments(overrides: Iterable[str], problems: _Problems) -> Iterator[_Entry]:
    for number, argument in enumerate(overrides, start=AFTER_ALL_LINES + 1):
        place = _Place(number, f"{COMMAND_LINE}: {argument}")
        try:
            yield from _in_argument(argument, place)
        except YamlProblem as problem:
            problems.add(place.line, place.text, str(problem))


def _in_argument(argument: str, place: _Place) -> Iterator[_Entry]:
    name, _, text = argument.partition("=")
    return _walk([(ScalarNode("", name.strip()), compose_argument(text))], "", lambda _: place)


def _walk(pairs: Iterable[tuple[Node, Node]], prefix: str, locate: Callable[[Node], _Place]) -> Iterator[_Entry]:
    for name, node in pairs:
        key = prefix + (name.value if isinstance(name, ScalarNode) else "[...]")
        yield _Entry(key, locate(name), node)
        if key in SECTIONS and isinstance(node, MappingNode):
            yield from _walk(node.value, f"{key}.", locate)


def _collect(entries: Iterable[_Entry], problems: _Problems) -> dict[str, _Setting]:
    """The settings among the entries of one source; an entry that cannot be one is a problem."""
    settings: dict[str, _Setting] = {}
    seen: dict[str, _Place] = {}
    for key, place, node in entries:
        if key not in KNOBS and key not in SECTIONS and not key.startswith(f"{OPEN}."):
            problems.add(place.line, place.text, f"unknown key '{key}'{nearest_key(key)}")
        elif key in seen:
            problems.add(place.line, place.of(key), f"given twice, first in {seen[key].short}")
        else:
            seen[key] = place
            try:
                if not _is_section(key, node):
                    settings[key] = _Setting(plain_value(node), place)
            except YamlProblem as problem:
                problems.add(place.line, place.of(key), str(problem))
    _keep_one_spelling(settings, problems)
    return settings


def _is_section(key: str, node: Node) -> bool:
    """Whether there is no value to take: sections were walked into, and may be left empty."""
    if key not in SECTIONS and key != OPEN:
        return False
    if is_left_empty(node):
        return True
    if not isinstance(node, MappingNode):
        inside = next((knob for knob in KNOBS if knob.startswith(f"{key}.")), f"{OPEN}.width")
        raise YamlProblem(f"{show(plain_value(node))} is not a section (expected keys in it, such as {inside})")
    return key in SECTIONS


def _given(settings: dict[str, _Setting], keys: Iterable[str]) -> list[str]:
    return [key for key in keys if key in settings and settings[key].value is not None]


def _keep_one_spelling(settings: dict[str, _Setting], problems: _Problems) -> None:
    for pair in (*ONE_OF, *AT_MOST_ONE_OF):
        if len(_given(settings, pair)) == 2:
            _tell(settings, pair, f"{pair[0]} and {pair[1]} are two spellings of one thing; give one", problems)
            del settings[pair[1]]


def _merge(from_file: dict[str, _Setting], from_arguments: dict[str, _Setting]) -> dict[str, _Setting]:
    replaced = {key for pair in (*ONE_OF, *AT_MOST_ONE_OF) if _given(from_arguments, pair) for key in pair}
    return {key: setting for key, setting in from_file.items() if key not in replaced} | from_arguments


_MOST_ROUNDS = 50
"""What stands in for a setting that was dropped may break the rule that dropped it."""


def _validate(settings: dict[str, _Setting], problems: _Problems) -> RunConfig:
    """The config of the valid settings. Each round drops the bad ones, so that rules across knobs are checked too."""
    for _ in range(_MOST_ROUNDS):
        try:
            return RunConfig.model_validate(_nested(settings))
        except ValidationError as invalid:
            # Of a value that may also be `auto`, one error is enough.
            errors = [error for error in invalid.errors() if error["loc"][-1:] != ("literal['auto']",)]
            bad = {key for error in errors for key in _blame(error, settings, problems)}
        needed = {key: _Setting(1, settings[key].place) for pair in ONE_OF for key in pair if key in bad}
        settings = {key: setting for key, setting in settings.items() if key not in bad} | needed
    problems.raise_if_any()
    raise AssertionError("settings that are told of in each round, and no problem")


def _nested(settings: dict[str, _Setting]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key in sorted(settings):
        *sections, name = key.split(".", 2)
        reduce(lambda inner, section: inner.setdefault(section, {}), sections, nested)[name] = settings[key].value
    return nested


def _blame(error: ErrorDetails, settings: dict[str, _Setting], problems: _Problems) -> list[str]:
    """Tell the error; return the keys to leave out: the one at fault, or all that break a rule together."""
    where = ".".join(map(str, error["loc"]))
    for key, (value, place) in settings.items():
        if f"{where}.".startswith(f"{key}."):
            problems.add(place.line, place.of(key), explain(key, value, error))
            return [key]
    text = str(error["ctx"]["error"])
    inside = [key for key in settings if not where or key.startswith(f"{where}.")]
    named = [key for key in inside if key.rpartition(".")[2] in re.findall(r"\w+", text)]
    _tell(settings, named or inside, f"{where}: {text}" if where else text, problems)
    return named if named and not where else inside


def _tell(settings: dict[str, _Setting], keys: Sequence[str], problem: str, problems: _Problems) -> None:
    places = sorted({settings[key].place for key in keys})
    where = [place.short if place.origin == COMMAND_LINE == places[0].origin else place.text for place in places[1:]]
    problems.add(places[-1].line, " and ".join([places[0].text, *where]), problem)
