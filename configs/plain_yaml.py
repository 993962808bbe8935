"""YAML 1.2 to plain values and back, with the line of everything. No tag builds anything, so no text can run code."""

import difflib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from configs.errors import ConfigError

TAG = "tag:yaml.org,2002:"
WORD = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
PLAIN_WORDS = {
    "mapping values are not allowed here": "a ':' where none can stand; check the indentation and the line above, "
    "and put values that hold ': ' in quotes",
    "found character '\\t' that cannot start any token": "a tab; use spaces",
}


class YamlProblem(Exception):  # told to the user by whoever knows the file's name
    """Text that is not valid YAML, or YAML that is not a plain value."""

    def __init__(self, problem: str, line: int = 1) -> None:
        super().__init__(problem)
        self.line = line


def compose_file(path: Path) -> MappingNode:
    """The tree of a file that holds a mapping. Raises ConfigError."""
    try:
        root = compose(_read_text(path))
    except YamlProblem as problem:
        raise ConfigError(f"{path}:{problem.line}: {problem}") from problem
    if root is None:
        raise ConfigError(f"{path}:1: the file is empty (expected keys such as max_epochs and global_batch_size)")
    if not isinstance(root, MappingNode):
        raise ConfigError(f"{path}:{line_of(root)}: not a mapping (expected lines such as 'max_epochs: 5')")
    return root


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a folder (expected a YAML file){_presets(path)}") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{path}: no such file{_presets(path)}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise YamlProblem(f"not UTF-8 text (byte 0x{error.object[error.start]:02x})", line) from error


def _presets(path: Path) -> str:
    """The nearest files there are: beside `path`, or among the project's presets."""
    folder = path if path.is_dir() else path.parent
    files = sorted(folder.glob("*.yaml")) or sorted(Path(__file__).parent.glob("*.yaml"))
    here = Path.cwd()
    names = {file.stem: str(file.relative_to(here) if file.is_relative_to(here) else file) for file in files}
    if near := difflib.get_close_matches(path.stem, names, cutoff=0.5):
        return f"; did you mean {' or '.join(names[stem] for stem in near)}?"
    return f"; choose from {', '.join(names.values())}" if names else ""


def compose(text: str) -> Node | None:
    """The tree of one document, plain all through, or None where there is nothing in it. Raises YamlProblem."""
    try:
        root: Node | None = YAML(typ="safe", pure=True).compose(text)
        if root is not None:
            _check_plain(root)
    except MarkedYAMLError as error:
        raise _syntax_problem(error) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlProblem(f"not valid YAML: character {chr(error.character)!r} is not allowed", line) from error
    except RecursionError as error:
        raise YamlProblem("not valid YAML: nested too deeply") from error
    return root


def compose_argument(text: str) -> Node:
    """The tree of a value on the command line, all of it. Raises YamlProblem."""
    try:
        node = compose(text)
    except YamlProblem as problem:
        raise YamlProblem(f"{problem}; put the value in quotes") from problem
    if node is None:
        raise YamlProblem("there is no value (expected key=value, such as optim.lr=0.1, or key=null for none)")
    if isinstance(node, ScalarNode) and node.style is None and node.value != text.strip():
        raise YamlProblem(f"YAML reads only {node.value!r} of the value; put it in quotes")
    return node


def line_of(node: Node) -> int:
    """The line that the node starts in, from 1."""
    return int(node.start_mark.line) + 1


def is_left_empty(node: Node) -> bool:
    """`key:` with nothing behind it, as against `key: null`."""
    return isinstance(node, ScalarNode) and node.value == "" and node.style is None


def plain_value(node: Node) -> Any:
    """None, bool, int, float, str, or lists and dicts of them, of a node that compose() gave. Raises YamlProblem."""
    if isinstance(node, MappingNode):
        return _mapping(node)
    if isinstance(node, SequenceNode):
        return [plain_value(item) for item in node.value]
    kind = str(node.tag).removeprefix(TAG)
    try:
        return SCALARS[kind](node.value)
    except ValueError as error:
        raise YamlProblem(f"{node.value[:40]!r} cannot be read as !!{kind}", line_of(node)) from error


def _mapping(node: MappingNode) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, item in node.value:
        key = plain_value(name)
        if not isinstance(key, str):
            raise YamlProblem(f"key {key!r} is not text; put it in quotes", line_of(name))
        if key in values:
            raise YamlProblem(f"key '{key}' is given twice", line_of(name))
        values[key] = plain_value(item)
    return values


def _integer(text: str) -> int:
    """Decimal whatever zeros it starts with: 010 is 10. Base 8 only as 0o10, which YAML 1.2 asks for."""
    return int(text, 0) if text.lstrip("+-")[:2].lower() in ("0x", "0o", "0b") else int(text)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() in ("true", "yes", "on"),
    "int": _integer,
    "float": _float,
    "str": str,
    # YAML 1.2 has neither dates nor the signs << and =; ruamel.yaml finds them all the same.
    "timestamp": str,
    "merge": str,
    "value": str,
}


def _check_plain(node: Node) -> None:
    if node.anchor is not None:
        raise YamlProblem("anchors and aliases (& and *) are not taken; write the value out", line_of(node))
    kind = str(node.tag).removeprefix(TAG)
    if kind not in (
        ("map",) if isinstance(node, MappingNode) else ("seq",) if isinstance(node, SequenceNode) else SCALARS
    ):
        tag = kind if kind == str(node.tag) else f"!!{kind}"
        raise YamlProblem(f"tag {tag} is not taken; write a plain value", line_of(node))
    if isinstance(node, MappingNode):
        for pair in node.value:
            _check_plain(pair[0])
            _check_plain(pair[1])
    elif isinstance(node, SequenceNode):
        for item in node.value:
            _check_plain(item)


def flow(value: Any) -> str:
    """A plain value as YAML on one line, which reads back as the same value."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{flow(key)}: {flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(flow, value))}]"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f".{value}".replace(".-", "-.")
    return "null" if value is None else repr(value).lower()


def _quoted(text: str) -> str:
    if WORD.fullmatch(text) and text.lower() not in ("null", "true", "false", "yes", "no", "on", "off"):
        return text
    if text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in escaped) + '"'


def _syntax_problem(error: MarkedYAMLError) -> YamlProblem:
    problem, mark, start = str(error.problem), error.problem_mark, error.context_mark
    if start is not None and "end of stream" in problem:
        mark, start = start, None  # what was never closed is where to look, not the end of the file
    text = f"not valid YAML: {PLAIN_WORDS.get(problem, problem)}"
    if start is not None and mark is not None and start.line != mark.line:
        text += f" ({error.context} that starts in line {start.line + 1})"
    return YamlProblem(text, 1 if mark is None else mark.line + 1)
