"""Reading configs: every kind of bad input with its exact message, values as YAML 1.2 means them, writing them back."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.errors import EXIT_CONFIG, ConfigError
from configs.loader import COMMAND_LINE, LoadedConfig, differences, dump_config, load_config
from configs.schema import KNOBS, RunConfig

PROJECT = Path(__file__).parents[2]
PRESETS = sorted((PROJECT / "configs").glob("*.yaml"))
START = "max_epochs: 5\nglobal_batch_size: 64\n"  # lines 1 and 2: what every config needs

Load = Callable[..., LoadedConfig]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """load(text, *overrides) of a file x.yaml that starts with START."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str | bytes, *overrides: str, start: str = START) -> LoadedConfig:
        data = start.encode() + (text if isinstance(text, bytes) else text.encode())
        Path("x.yaml").write_bytes(data)
        return load_config(Path("x.yaml"), overrides)

    return load_text


def problems_of(load: Load, text: str | bytes, *overrides: str, start: str = START) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides, start=start)
    assert caught.value.exit_code == EXIT_CONFIG
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def config(**fields: Any) -> RunConfig:
    return RunConfig.model_validate({"max_epochs": 5, "global_batch_size": 64} | fields)


# Problem 19: numbers and words are what they look like.

VALUES = [
    ("optim.lr", "1e-3", 0.001),
    ("optim.lr", "1E-3", 0.001),
    ("optim.lr", "1.e-3", 0.001),
    ("optim.lr", ".5", 0.5),
    ("optim.lr", "+5e-1", 0.5),
    ("optim.lr", "1", 1.0),
    ("optim.weight_decay", "5e-4", 0.0005),
    ("max_epochs", "1e0", 1),
    ("max_epochs", "1e3", 1000),
    ("max_epochs", "1_000", 1000),
    ("seed", "010", 10),
    ("seed", "08", 8),
    ("seed", "0o10", 8),
    ("seed", "0x10", 16),
    ("mixed_precision", "no", "no"),
    ("mixed_precision", "off", "no"),
    ("mixed_precision", "false", "no"),
    ("mixed_precision", "fp32", "no"),
    ("mixed_precision", "none", "no"),
    ("mixed_precision", "bf16", "bf16"),
    ("data.mirror", "12:30", "12:30"),
    ("data.mirror", "2020-01-01", "2020-01-01"),
    ("data.mirror", "null", None),
    ("data.mirror", "'null'", "null"),
    ("data.mirror", "https://a.b/c?d=e", "https://a.b/c?d=e"),
    ("data.root", "/a b/c", "/a b/c"),
    ("drop_last", "true", True),
    ("eval.every_epochs", "null", None),
    ("optim.betas", "[0.8, 9e-1]", (0.8, 0.9)),
    ("model.args", "{width: 64, act: no, deep: {a: [1, 1e1]}}", {"width": 64, "act": "no", "deep": {"a": [1, 10.0]}}),
    ("model.name", "my.nets:Net", "my.nets:Net"),
]


def value_of(loaded: LoadedConfig, key: str) -> Any:
    value: Any = loaded.config
    for name in key.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_a_value_means_the_same_in_the_file_and_on_the_command_line(
    load: Load, key: str, text: str, value: Any
) -> None:
    in_file = load(f"{key}: {text}\n", start="global_batch_size: 64\n" if key == "max_epochs" else START)
    in_argument = load("", f"{key}={text}")
    for loaded in (in_file, in_argument):
        assert value_of(loaded, key) == value
        assert type(value_of(loaded, key)) is type(value)
    assert in_argument.origins[key] == COMMAND_LINE


def test_origins_name_the_place_of_every_knob(load: Load) -> None:
    loaded = load("optim:\n  lr: 0.2\n\n  momentum: 0.9\nmodel: {args: {width: 8}}\n", "seed=3", "model.args.depth=2")
    assert loaded.origins.keys() >= KNOBS.keys()
    chosen = {key: origin for key, origin in loaded.origins.items() if origin != "default"}
    assert chosen == {
        "max_epochs": "x.yaml:1",
        "global_batch_size": "x.yaml:2",
        "optim.lr": "x.yaml:4",
        "optim.momentum": "x.yaml:6",
        "model.args": "x.yaml:7",
        "model.args.depth": COMMAND_LINE,
        "seed": COMMAND_LINE,
    }
    assert loaded.config.model.args == {"width": 8, "depth": 2}


def test_sections_may_be_left_empty_given_on_the_command_line_and_written_with_dots(load: Load) -> None:
    loaded = load(
        "optim:\nmodel:\n  args:\ndata.augment.shift: 1\n", "ema={half_life_samples: 1e4}", "data.augment={flip: true}"
    )
    assert loaded.config == config(ema={"half_life_samples": 10_000.0}, data={"augment": {"shift": 1, "flip": True}})


def test_model_args_are_replaced_as_a_whole_or_set_one_by_one(load: Load) -> None:
    text = "model: {args: {width: 8, depth: 2}}\n"
    assert load(text, "model.args={width: 16}").config.model.args == {"width": 16}
    assert load(text, "model.args.width=16").config.model.args == {"width": 16, "depth": 2}
    assert load(text, "model.args.width=16", "model.args={depth: 3}").config.model.args == {"width": 16, "depth": 3}


def test_files_with_bom_and_windows_line_ends_are_read(load: Load) -> None:
    assert load("seed: 3\r\n", start="\ufeffmax_epochs: 5\r\nglobal_batch_size: 64\r\n").config == config(seed=3)


# One of two spellings.

TWICE = "are two spellings of one thing; give one"


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("", ["max_steps=10"], {"max_epochs": None, "max_steps": 10}),
        ("", ["max_steps=null"], {}),
        ("", ["per_device_batch_size=8"], {"global_batch_size": None, "per_device_batch_size": 8}),
        ("schedule: {warmup_steps: 5}", ["schedule.warmup_epochs=0.5"], {"schedule": {"warmup_epochs": 0.5}}),
        ("schedule: {warmup_epochs: 5}", ["schedule={warmup_steps: 7}"], {"schedule": {"warmup_steps": 7}}),
        ("max_steps: null", [], {}),
    ],
)
def test_an_override_replaces_the_other_spelling_of_the_file(
    load: Load, text: str, overrides: list[str], expected: dict[str, Any]
) -> None:
    loaded = load(text, *overrides)
    assert loaded.config == config(**expected)
    dropped = {"max_epochs", "global_batch_size"} & {key for key, value in expected.items() if value is None}
    assert all(loaded.origins[key] == "default" for key in dropped)


@pytest.mark.parametrize(
    ("text", "overrides", "problem"),
    [
        (
            "max_steps: 10",
            [],
            f"x.yaml:1 and x.yaml:3: max_epochs and max_steps {TWICE}",
        ),
        (
            "per_device_batch_size: 10",
            ["max_steps=3"],
            f"x.yaml:2 and x.yaml:3: global_batch_size and per_device_batch_size {TWICE}",
        ),
        (
            "schedule:\n  warmup_steps: 10\n  warmup_epochs: 1\n",
            [],
            f"x.yaml:4 and x.yaml:5: schedule.warmup_steps and schedule.warmup_epochs {TWICE}",
        ),
        (
            "",
            ["max_steps=10", "max_epochs=2"],
            f"command line: max_steps=10 and max_epochs=2: max_epochs and max_steps {TWICE}",
        ),
    ],
)
def test_two_spellings_in_one_source_are_refused(load: Load, text: str, overrides: list[str], problem: str) -> None:
    assert problems_of(load, text, *overrides) == [problem]


def test_one_spelling_is_needed(load: Load) -> None:
    assert problems_of(load, "seed: 1", start="") == [
        "x.yaml: give max_epochs or max_steps",
        "x.yaml: give global_batch_size or per_device_batch_size",
    ]


# Values that a knob does not take, the same in words in the file and on the command line.

RANGES = "expected a number from 0 to 1"
BAD_VALUES = [
    ("optim.lr", "fast", "'fast' is not a number (expected a number >= 0)"),
    ("optim.lr", "-1", "-1 is out of range (expected a number >= 0)"),
    ("optim.lr", ".inf", ".inf is out of range (expected a number >= 0)"),
    ("optim.lr", "true", "true is not a number (expected a number >= 0)"),
    ("optim.lr", "null", "null is not a number (expected a number >= 0)"),
    ("optim.lr", "'0.1'", "'0.1' is not a number (expected a number >= 0)"),
    ("optim.lr", "{a: 1}", "{a: 1} is not a number (expected a number >= 0)"),
    ("optim.eps", "0", "0 is out of range (expected a number > 0)"),
    ("optim.max_grad_norm", "0", "0 is out of range (expected a number > 0, or null)"),
    ("loss.label_smoothing", "2", f"2 is out of range ({RANGES})"),
    ("loss.label_smoothing", ".nan", f".nan is out of range ({RANGES})"),
    ("eval.batch_size", "0", "0 is out of range (expected a whole number >= 1)"),
    ("eval.batch_size", "1.5", "1.5 is not a whole number (expected a whole number >= 1)"),
    ("checkpoint.keep", "1", "1 is out of range (expected a whole number >= 2)"),
    ("seed", "-1", "-1 is out of range (expected a whole number from 0 to 9223372036854775807)"),
    ("seed", "1e300", "1e+300 is out of range (expected a whole number from 0 to 9223372036854775807)"),
    ("drop_last", "no", "'no' is unknown (expected one of true, false); did you mean 'false'?"),
    ("optim.fused", "1", "1 is unknown (expected one of true, false, or null)"),
    (
        "mixed_precision",
        "fp61",
        "'fp61' is unknown (expected one of auto, no, fp16, bf16); did you mean 'fp16'?",
    ),
    ("device", "CUDA", "'CUDA' is unknown (expected one of auto, cuda, cpu, mps); did you mean 'cuda'?"),
    (
        "optim.name",
        "lyon",
        "'lyon' is unknown (expected one of sgd, adam, adamw, rmsprop, lamb, lion, muon); did you mean 'lion'?",
    ),
    ("data.root", "2024", "2024 is not text (expected text, in quotes where it looks like a number)"),
    (
        "data.mean",
        "0.5",
        "0.5 is not a list of numbers (expected one or more numbers in brackets, such as [0.5], or null)",
    ),
    (
        "optim.betas",
        "[0.9, x]",
        "[0.9, x] is not a list of numbers (expected one or more numbers in brackets, such as [0.5])",
    ),
    (
        "optim.betas",
        "[.nan, .inf]",
        "[.nan, .inf] is not a list of numbers (expected one or more numbers in brackets, such as [0.5])",
    ),
    (
        "optim.betas",
        "[]",
        "[] is not a list of numbers (expected one or more numbers in brackets, such as [0.5])",
    ),
    (
        "data.name",
        "minst",
        "'minst' is unknown (expected one of mnist, fashion_mnist, cifar10, cifar100, imagefolder, webdataset, "
        "huggingface, "
        "or module:callable); did you mean 'mnist'?",
    ),
    (
        "model.name",
        "resnet",
        "'resnet' is unknown (expected one of mlp, mnist_cnn, small_resnet, whitened_cnn, a network of torchvision, "
        "torchvision/NAME, timm/NAME or module:callable); did you mean 'resnet50'?",
    ),
    ("model.args", "5", "5 is not a section (expected keys in it, such as model.args.width)"),
    ("model.args", "{1: 2}", "key 1 is not text; put it in quotes"),
    ("model.args", "{a: 1, a: 2}", "key 'a' is given twice"),
    ("ema", "null", "null is not a section (expected keys in it, such as ema.half_life_samples)"),
    ("optim", "5", "5 is not a section (expected keys in it, such as optim.name)"),
]


@pytest.mark.parametrize(("key", "text", "problem"), BAD_VALUES)
def test_a_bad_value_is_one_line_with_place_value_and_what_was_expected(
    load: Load, key: str, text: str, problem: str
) -> None:
    assert problems_of(load, f"{key}: {text}\n") == [f"x.yaml:3: {key}: {problem}"]
    assert problems_of(load, "", f"{key}={text}") == [f"command line: {key}={text}: {problem}"]


def test_a_value_that_is_not_what_its_tag_says(load: Load) -> None:
    assert problems_of(load, "seed: !!int x") == ["x.yaml:3: seed: 'x' cannot be read as !!int"]
    assert problems_of(load, f"seed: {'9' * 5000}") == [f"x.yaml:3: seed: '{'9' * 40}' cannot be read as !!int"]


def test_a_long_value_is_cut(load: Load) -> None:
    [problem] = problems_of(load, f"optim: {{lr: {'x' * 500}}}")
    assert problem == f"x.yaml:3: optim.lr: '{'x' * 76}... is not a number (expected a number >= 0)"


def test_a_problem_stays_on_its_line_and_steers_no_terminal(load: Load) -> None:
    assert problems_of(load, "", "a\n\x1b[31m=1") == [
        r"command line: a\n\x1b[31m=1: unknown key 'a\n\x1b[31m'",
    ]


@pytest.mark.parametrize(
    ("text", "overrides", "problem"),
    [
        (
            "optim:\n  name: adam\n  momentum: 0.9",
            [],
            "x.yaml:5: optim: momentum is for sgd, rmsprop and muon; adam takes betas",
        ),
        (
            "optim:\n  name: adam",
            ["optim.momentum=0.9"],
            "command line: optim.momentum=0.9: optim: momentum is for sgd, rmsprop and muon; adam takes betas",
        ),
        (
            "optim:\n  nesterov: true",
            [],
            "x.yaml:4: optim: nesterov needs name: sgd or muon, and momentum > 0",
        ),
        ("optim: {betas: [0.9]}", [], "x.yaml:3: optim: betas are two numbers in [0, 1), got [0.9]"),
        ("data: {mean: [0.5]}", [], "x.yaml:3: data: mean and std are given together or not at all"),
        (
            "data:\n  mean: [0.5]\n  std: [0.5, 0.5]",
            [],
            "x.yaml:4 and x.yaml:5: data: mean has 1 channels and std 2",
        ),
        ("data: {mean: [0], std: [0]}", [], "x.yaml:3: data: std must be positive, got [0.0]"),
        (
            "dtype: float64",
            ["mixed_precision=fp16"],
            "x.yaml:3 and command line: mixed_precision=fp16: dtype: float64 goes with mixed_precision: no, not fp16",
        ),
    ],
)
def test_values_that_do_not_go_together(load: Load, text: str, overrides: list[str], problem: str) -> None:
    assert problems_of(load, text, *overrides) == [problem]


# Keys.


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("optim.weigth_decay", "'optim.weight_decay'"),
        ("optim.learning_rate", "'optim.lr'"),
        ("optim.label_smoothing", "'loss.label_smoothing'"),
        ("lr", "'optim.lr'"),
        ("weigth_decay", "'optim.weight_decay'"),
        ("warmup_steps", "'schedule.warmup_steps'"),
        ("batch_size", "'global_batch_size'"),
        ("epochs", "'max_epochs'"),
        ("amp", "'mixed_precision'"),
        ("optimizer", "'optim'"),
        ("checkpoints.every_steps", "'checkpoint.every_steps'"),
        ("every_steps", "'eval.every_steps' or 'checkpoint.every_steps' or 'log.every_steps'"),
        ("--optim.lr", "'optim.lr'"),
        ("optim.lr.x", "'optim.lr'"),
    ],
)
def test_an_unknown_key_names_the_nearest(load: Load, key: str, nearest: str) -> None:
    problem = f"unknown key '{key}'; did you mean {nearest}?"
    assert problems_of(load, f"{key}: 1\n") == [f"x.yaml:3: {problem}"]
    assert problems_of(load, "", f"{key}=1") == [f"command line: {key}=1: {problem}"]


def test_an_unknown_key_with_nothing_near(load: Load) -> None:
    assert problems_of(load, "zzz: 1") == ["x.yaml:3: unknown key 'zzz'"]
    assert problems_of(load, "? [a]\n: 1") == ["x.yaml:3: unknown key '[...]'"]


def test_an_unknown_section_is_told_once_and_a_misspelt_need_is_not_told_as_missing(load: Load) -> None:
    assert problems_of(load, "optm: {lr: 1, momentum: 2}\nmax_epoch: 5", start="global_batch_size: 64\n") == [
        "x.yaml:2: unknown key 'optm'; did you mean 'optim'?",
        "x.yaml:3: unknown key 'max_epoch'; did you mean 'max_epochs'?",
    ]


@pytest.mark.parametrize(
    ("text", "overrides", "problems"),
    [
        ("seed: 1\nseed: 1", [], ["x.yaml:4: seed: given twice, first in x.yaml:3"]),
        ("optim:\n  lr: 1\n  lr: 2", [], ["x.yaml:5: optim.lr: given twice, first in x.yaml:4"]),
        ("optim: {lr: 1}\noptim.lr: 2", [], ["x.yaml:4: optim.lr: given twice, first in x.yaml:3"]),
        ("optim: {lr: 1}\noptim: {eps: 1}", [], ["x.yaml:4: optim: given twice, first in x.yaml:3"]),
        ("", ["optim.lr=1", "optim.lr=2"], ["command line: optim.lr=2: given twice, first in optim.lr=1"]),
        (
            "",
            ["optim.lr=1", "optim={lr: 2}"],
            ["command line: optim={lr: 2}: optim.lr: given twice, first in optim.lr=1"],
        ),
    ],
)
def test_a_key_given_twice_names_both_places(load: Load, text: str, overrides: list[str], problems: list[str]) -> None:
    assert problems_of(load, text, *overrides) == problems


NO_VALUE = "there is no value (expected key=value, such as optim.lr=0.1, or key=null for none)"


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("optim.lr", NO_VALUE),
        ("data.mirror=", NO_VALUE),
        ("data.root=/a #b", "YAML reads only '/a' of the value; put it in quotes"),
        ("data.root=@x", "not valid YAML: found character '@' that cannot start any token; put the value in quotes"),
        ("data.mean=[0.5", "not valid YAML: expected ',' or ']', but got '<stream end>'; put the value in quotes"),
        ("init_from=!!python/name:os.system x", "tag !!python/name:os.system is not taken; write a plain value"),
    ],
)
def test_a_broken_argument_is_named(load: Load, argument: str, problem: str) -> None:
    [told] = problems_of(load, "", argument)
    assert told.removesuffix("; put the value in quotes") == f"command line: {argument}: {problem}".removesuffix(
        "; put the value in quotes"
    )


def test_all_problems_are_told_at_once_in_order(load: Load) -> None:
    text = """\
optim:
  lr: fast
  weigth_decay: 1
  momentum: 0.9
  name: adam
loss: {label_smoothing: 2}
dtype: float64
max_steps: 3
"""
    assert problems_of(load, text, "mixed_precision=fp16", "eval.batch_size=0", "lr=3", "seed") == [
        "x.yaml:4: optim.lr: 'fast' is not a number (expected a number >= 0)",
        "x.yaml:5: unknown key 'optim.weigth_decay'; did you mean 'optim.weight_decay'?",
        "x.yaml:6: optim: momentum is for sgd, rmsprop and muon; adam takes betas",
        "x.yaml:8: loss.label_smoothing: 2 is out of range (expected a number from 0 to 1)",
        f"x.yaml:1 and x.yaml:10: max_epochs and max_steps {TWICE}",
        "x.yaml:9 and command line: mixed_precision=fp16: dtype: float64 goes with mixed_precision: no, not fp16",
        "command line: eval.batch_size=0: 0 is out of range (expected a whole number >= 1)",
        "command line: lr=3: unknown key 'lr'; did you mean 'optim.lr'?",
        f"command line: seed: {NO_VALUE}",
    ]


# Files that are no config.

EMPTY = "the file is empty (expected keys such as max_epochs and global_batch_size)"
NO_MAPPING = "not a mapping (expected lines such as 'max_epochs: 5')"
COLON = (
    "not valid YAML: a ':' where none can stand; check the indentation and the line above, "
    "and put values that hold ': ' in quotes"
)
NO_ANCHORS = "anchors and aliases (& and *) are not taken; write the value out"


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, EMPTY),
        ("# nothing\n", 1, EMPTY),
        ("- a\n- b\n", 1, NO_MAPPING),
        ("\nhello\n", 2, NO_MAPPING),
        (b"a: 1\nb: \xe9\n", 2, "not UTF-8 text (byte 0xe9)"),
        (b"\xff\xfea\x00", 1, "not UTF-8 text (byte 0xff)"),
        ("a: 1\nb: \x01\n", 2, r"not valid YAML: character '\x01' is not allowed"),
        ("optim:\n\tlr: 1\n", 2, "not valid YAML: a tab; use spaces"),
        ("a: 1\n  b: 2\n", 2, COLON),
        ("a: b: c\n", 1, COLON),
        (
            "a: {b: 1\nc: 3\n",
            2,
            "not valid YAML: expected ',' or '}', but got ':' (while parsing a flow mapping that starts in line 1)",
        ),
        ("a: 1\nb: 'x\n\n\n", 2, "not valid YAML: found unexpected end of stream"),
        ("a: " + "[" * 700, 1, "not valid YAML: nested too deeply"),
        ("a: 1\nb: *c\n", 2, "not valid YAML: found undefined alias 'c'"),
        ("a: 1\nb: &c {d: *c}\n", 2, NO_ANCHORS),
        (
            "a: 1\nb: !!python/object/apply:os.system ['touch hacked']\n",
            2,
            "tag !!python/object/apply:os.system is not taken; write a plain value",
        ),
        ("optim: !!python/object:os.x {lr: 1}\n", 1, "tag !!python/object:os.x is not taken; write a plain value"),
        ("a: !mine 1\n", 1, "tag !mine is not taken; write a plain value"),
    ],
)
def test_a_file_that_is_no_config(load: Load, text: str | bytes, line: int, problem: str) -> None:
    assert problems_of(load, text, start="") == [f"x.yaml:{line}: {problem}"]
    assert not Path("hacked").exists()


def test_two_documents_are_refused(load: Load) -> None:
    [problem] = problems_of(load, "---\nseed: 1\n")
    assert problem.startswith("x.yaml:3: not valid YAML: but found another document")


def test_a_missing_file_names_the_nearest_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my").mkdir()
    for name in ("mnist", "fashion_mnist", "tutorial"):
        Path(f"my/{name}.yaml").write_text(START)
    for path, problem in {
        "my/minst.yaml": "no such file; did you mean my/mnist.yaml?",
        "my/tutorial": "no such file; did you mean my/tutorial.yaml?",
        "my/zzz.yaml": "no such file; choose from my/fashion_mnist.yaml, my/mnist.yaml, my/tutorial.yaml",
        "my": "is a folder (expected a YAML file); choose from my/fashion_mnist.yaml, my/mnist.yaml, my/tutorial.yaml",
        "my/mnist.yaml/x": f"no such file; choose from {', '.join(map(str, PRESETS))}",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_config(Path(path))
        assert caught.value.problems == [f"{path}: {problem}"]


def test_a_bare_preset_name_finds_the_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    with pytest.raises(ConfigError, match=r"^smoke: no such file; did you mean configs/smoke\.yaml\?$"):
        load_config(Path("smoke"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_loads_and_is_written_back(path: Path, tmp_path: Path) -> None:
    loaded = load_config(path)
    written = tmp_path / "config.yaml"
    written.write_text(dump_config(loaded.config))
    assert load_config(written).config == loaded.config


# Writing and comparing.

CONFIGS = [
    config(),
    config(max_epochs=None, max_steps=7, global_batch_size=None, per_device_batch_size=3, mixed_precision="off"),
    config(
        data={"name": "my.data:Mine", "mean": [0.5, 1e-05, 1 / 3], "std": [1e16, 0.25, 1.0], "num_classes": 7},
        optim={"name": "adamw", "lr": 1e-30, "betas": [0.8, 0.99], "max_grad_norm": 1},
        schedule={"name": "one_cycle", "warmup_epochs": 0.5},
    ),
    config(
        model={
            "name": "mlp",
            "args": {
                "hidden": [64, 32],
                "nested": {"a": [{"b": None}, True, []], "c d": {}},
                "words": ["no", "010", "1e-3", "null", "True", "12:30", "2020-01-01", "", " a ", "-", "<<", "=", "~"],
                "signs": [
                    "a: b",
                    "a #b",
                    "#",
                    "'",
                    '"',
                    "\\",
                    "{",
                    "[a",
                    "&a",
                    "*a",
                    "!a",
                    "%a",
                    "@a",
                    "`a",
                    "| ",
                    "> ",
                ],
                "controls": ["\t", "\n", "a\r\nb", "\x00", "\x1b", "\x7f", "\x85", "\u2028", "\ufeff", "\U0001f600"],
                "numbers": [0, -1, 10**30, 1.0, 1e300, -2.5e-7, float("inf"), float("-inf")],
            },
        },
        data={"root": "x  y " * 60},
        init_from="runs/a b",
    ),
]


@pytest.mark.parametrize("chosen", CONFIGS)
def test_a_config_is_written_in_full_and_reads_back_equal(chosen: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(chosen), encoding="utf-8")
    loaded = load_config(path)
    assert loaded.config == chosen
    assert set(loaded.origins) == set(KNOBS)
    assert "default" not in loaded.origins.values()


def test_a_written_config_takes_overrides(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(CONFIGS[0]), encoding="utf-8")
    assert load_config(path, ["max_steps=3"]).config == config(max_epochs=None, max_steps=3)


def test_what_a_written_config_looks_like() -> None:
    text = dump_config(CONFIGS[2])
    assert text.startswith("seed: 0\nmax_epochs: 5\nmax_steps: null\nglobal_batch_size: 64\n")
    assert "\ndata:\n  name: 'my.data:Mine'\n  root: data\n  mirror: null\n" in text
    assert "\n  mean: [0.5, 1e-05, 0.3333333333333333]\n" in text
    assert "\n  augment:\n    shift: 0\n" in text
    assert "\n  args: {}\n" in text


def test_differences_list_what_is_not_free_to_change() -> None:
    old = config(model={"args": {"width": 8, "depth": 2}}, optim={"lr": 0.1})
    new = config(
        max_epochs=None,
        max_steps=9,
        device="cpu",
        model={"args": {"width": 16, "act": "relu"}},
        optim={"lr": 0.2, "name": "adam"},
        data={"root": "/x", "num_workers": 9, "mean": [0.5], "std": [0.5]},
        eval={"mode": "rank0", "batch_size": 10},
        checkpoint={"keep": 9},
        log={"every_steps": 1},
        launch={"grace_s": 1.0},
        expect={"min_top1": 0.5},
    )
    assert differences(old, new) == [
        "max_epochs: 5 -> null",
        "max_steps: null -> 9",
        "data.mean: null -> [0.5]",
        "data.std: null -> [0.5]",
        "optim.name: sgd -> adam",
        "optim.lr: 0.1 -> 0.2",
        "eval.batch_size: 500 -> 10",
        "model.args.width: 8 -> 16",
        "model.args.depth: 2 -> unset",
        "model.args.act: unset -> relu",
    ]
    assert differences(old, old) == []


def test_differences_do_not_hide_in_long_values() -> None:
    old, new = (config(model={"args": {"layers": [*range(100), last]}}) for last in (1, 2))
    assert len(differences(old, new)) == 1


def test_the_loader_imports_neither_torch_nor_accelerate() -> None:
    code = "import sys, configs.loader; sys.exit(' '.join({'torch', 'numpy', 'accelerate'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True)


def test_rules_that_contradict_each_other_end(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("max_epochs: 1\nglobal_batch_size: 8\n")
    given = ["virtual_shards=4", "per_device_batch_size=8", "global_batch_size=null"]
    with pytest.raises(ConfigError, match="virtual_shards needs global_batch_size"):
        load_config(tmp_path / "x.yaml", given)
