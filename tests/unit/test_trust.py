"""Nothing that is loaded can run code, and no name can leave its place or steer a terminal, a page or a shell."""

import ast
import shlex
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.contract import Outcome
from configs.errors import ConfigError
from configs.run_dir import RunDir, checked_run_name
from launch.follow import say
from launch.options import Options
from trainer.console import Console
from trainer.tracking import Tracker

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "code", "pty"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "torch.jit.load", "numpy.load"),
    *("np.load", "torch.hub.load", "dist.all_gather_object", "dist.broadcast_object_list", "dist.gather_object"),
    *("dist.scatter_object_list", "subprocess.getoutput", "subprocess.getstatusoutput", "torch.export.load"),
}


def what_could_run_code(source: str) -> list[str]:
    """Calls and imports that turn data into code, and processes started through a shell."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in modules if name.partition(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            is_safe = name == "torch.load" and given.get("weights_only") == "True"
            found += [name] if (name in FORBIDDEN_CALLS and not is_safe) or "shell" in given else []
    return found


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import load", "torch.load(x)", "import yaml", "eval(x)"),
        *("torch.load(x, weights_only=False)", "torch.load(x, weights_only=flag)"),
        *("subprocess.run(x, shell=True)", "dist.all_gather_object(a, b)", "os.system(x)"),
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert what_could_run_code(source)


def test_tensors_alone_may_be_read() -> None:
    assert what_could_run_code("torch.load(x, weights_only=True)") == []


def test_no_source_turns_data_into_code() -> None:
    files = [path for folder in ("configs", "launch", "trainer") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 50
    found = {str(path): what_could_run_code(path.read_text(encoding="utf-8")) for path in files}
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "name",
    ["..", ".", "a/b", "a\\b", "/etc", "a;b", "$(id)", "`id`", "a b", "-x", "--runs-dir", "a\nb", "a\x1b[2J", "é", "~"],
)
def test_names_of_runs_are_plain(name: str) -> None:
    with pytest.raises(ConfigError, match="is not usable") as error:
        checked_run_name(name)
    assert "\x1b" not in str(error.value)


def test_the_command_to_go_on_is_quoted(tmp_path: Path) -> None:
    options = Options(runs=Path("a folder; $(id)"), cwd=tmp_path)
    words = shlex.split(options.resume_command("demo"))
    assert words == ["python", "-m", "launch", "resume", "demo", "--runs-dir", "a folder; $(id)"]


NASTY = "zebra\x1b[2J\rFAILED\x07<script>alert(1)</script>"


def test_names_and_errors_of_others_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"class {NASTY}\nnext line", to_stderr=True)
    Console(active=True, terminal=None, every_s=1.0).line(f"class {NASTY}")
    out, err = capsys.readouterr()
    assert err == "class zebra\\x1b[2J\\rFAILED\\x07<script>alert(1)</script>\nnext line\n"
    assert out == "class zebra\\x1b[2J\\rFAILED\\x07<script>alert(1)</script>\n"


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")
def test_settings_are_text_in_tensorboard_and_no_page(tmp_path: Path) -> None:
    """What its text plugin makes of them, out of the fence of the code block too."""
    from tensorboard import plugin_util

    tracker = Tracker(RunDir(tmp_path), 0, f'{{"name": "```\n\n{NASTY}\n<img src=x onerror=alert(1)>"}}')
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    (event,) = reader.Tensors("config/text_summary")
    page = plugin_util.markdown_to_safe_html(event.tensor_proto.string_val[0])
    assert "zebra" in page
    assert "<script" not in page
    assert "<img" not in page


def test_an_outcome_is_json_in_one_line(tmp_path: Path) -> None:
    Outcome(0, "failed", 0.0, message=NASTY).save(tmp_path / "outcome.json")
    text = (tmp_path / "outcome.json").read_text()
    assert "\x1b" not in text
    loaded = Outcome.load(tmp_path / "outcome.json")
    assert loaded is not None
    assert loaded.message == NASTY
