"""The Makefile and its set-up, with stubs for Python and pip that record what they are asked: nothing is installed."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch import environment

ROOT = Path(__file__).resolve().parents[2]
OURS = ("configs", "launch", "trainer", "tests", "benchmarks")
TARGETS = {
    *("help", "setup", "train-single", "train-multigpu", "resume", "eval", "plan", "tensorboard", "smoke"),
    *("test", "test-gpu", "lint", "check", "bench", "bench-check", "bench-gpu", "clean"),
}
MARKER = ".venv/.lockstep-setup"

# As an interpreter it makes a "virtual environment" of itself; in there it plays pip and the project's own modules.
STUB = """#!/bin/sh
record() {{ {real} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >> {calls}; }}
case "$1 $2 $3" in
  "-m venv "*) record "$@"; mkdir -p "$3/bin"; echo "home = x" > "$3/pyvenv.cfg"; cp "$0" "$3/bin/python"; exit 0 ;;
  "-I -m pip") record "$@"; shift 3; . {behaviour}; exit 0 ;;
  "-m "*) record "$@"; echo "$STUB_SAYS"; env > {environment}; exit "${{STUB_EXIT:-0}}" ;;
  "-c import ensurepip"*) exit "${{STUB_NO_VENV:-0}}" ;;
  "-c from importlinter"*) exit 0 ;;
  *) exec {real} "$@" ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


class Checkout:
    """A copy of what the Makefile needs, with a stub for Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "check out"
        self.calls_file, self.behaviour, self.stub = folder / "calls", folder / "behaviour", folder / "bin" / "python3"
        for name in ("Makefile", "pyproject.toml", "constraints.txt", "launch/environment.py", ".ci/run"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.stub.parent.mkdir()
        paths = {
            "real": sys.executable,
            "calls": self.calls_file,
            "behaviour": self.behaviour,
            "environment": folder / "env",
        }
        self.stub.write_text(STUB.format(**{name: shlex.quote(str(path)) for name, path in paths.items()}))
        self.stub.chmod(0o755)
        self.pip_does("")

    def pip_does(self, shell: str) -> None:
        self.behaviour.write_text(shell)

    def make(self, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", *args],
            cwd=self.root,
            env=self.environment(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def start(self, *args: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            ["make", *args], cwd=self.root, env=self.environment({}), stdout=pipe, stderr=pipe, text=True
        )

    def environment(self, extra: dict[str, str]) -> dict[str, str]:
        """Without what a make that started these tests, or its user, may have set. A real pip would find nothing."""
        ours = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LANG") if name in os.environ}
        path = f"{self.stub.parent}{os.pathsep}{os.environ['PATH']}"
        return {
            **ours,
            "PATH": path,
            "PYTHON": str(self.stub),
            "PIP_NO_INDEX": "1",
            "PIP_CONFIG_FILE": os.devnull,
            **extra,
        }

    def calls(self) -> list[list[str]]:
        """What has been recorded since the last time."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]

    def setup_calls(self) -> list[str]:
        return ["venv" if call[:2] == ["-m", "venv"] else "pip" for call in self.calls()]

    def touch_pins(self) -> None:
        with (self.root / "constraints.txt").open("a") as file:
            file.write("# newer\n")


@pytest.fixture
def fresh(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = Checkout(tmp_path_factory.mktemp("make"))
    assert checkout.make("setup").returncode == 0
    return checkout


@pytest.fixture
def run(ready: Checkout) -> Iterator[Callable[..., list[list[str]]]]:
    """The commands that a make which succeeds has run."""

    def run_make(*args: str) -> list[list[str]]:
        done = ready.make(*args)
        assert done.returncode == 0, done.stderr
        return ready.calls()

    ready.calls()
    yield run_make
    ready.calls()


# --- targets ----------------------------------------------------------------------------------------------------------


def test_help_is_the_default_and_lists_each_target_and_variable(ready: Checkout) -> None:
    shown = ready.make().stdout
    listed = {line.split()[1] for line in shown.splitlines() if line.startswith("  make ")}
    assert listed == TARGETS
    assert shown == ready.make("help").stdout
    for variable in ("CONFIG=", "ARGS=", "NGPU=", "LAUNCHER=", "RUN=", "PYTHON=", "VENV=", "PIP_ARGS="):
        assert variable in shown


def test_each_target_runs_its_command(run: Callable[..., list[list[str]]]) -> None:
    launch = ["-m", "launch"]
    default = ["configs/mnist.yaml", "--nproc"]
    assert run("train-single") == [[*launch, "train", *default, "1", "--launcher", "torchrun"]]
    assert run("train-multigpu") == [[*launch, "train", *default, "auto", "--launcher", "torchrun"]]
    assert run("train-multigpu", "NGPU=4", "LAUNCHER=accelerate") == [
        [*launch, "train", *default, "4", "--launcher", "accelerate"]
    ]
    assert run("resume", "RUN=mnist-001") == [[*launch, "resume", "mnist-001"]]
    assert run("resume", "RUN=mnist-001", "NGPU=2") == [[*launch, "resume", "mnist-001", "--nproc", "2"]]
    assert run("eval", "RUN=mnist-001", "LAUNCHER=torchrun") == [
        [*launch, "eval", "mnist-001", "--launcher", "torchrun"]
    ]
    assert run("plan", "CONFIG=configs/x.yaml") == [[*launch, "plan", "configs/x.yaml"]]
    assert run("smoke") == [[*launch, "train", "configs/smoke.yaml", "--nproc", "2", "--launcher", "torchrun"]]
    assert run("tensorboard") == [["-m", "tensorboard.main", "--logdir", "runs", "--host", "localhost"]]
    assert run("test", "ARGS=-k 'a or b'") == [["-m", "pytest", "-k", "a or b"]]
    assert run("test-gpu") == [["-m", "pytest", "-m", "gpu", "-rs"]]
    assert run("bench", "WHAT=tutorial") == [["-m", "benchmarks", "tutorial"]]
    assert run("bench-check") == [["-m", "benchmarks", "--check"]]
    assert run("bench-gpu") == [["-m", "benchmarks", "gpu"]]
    lint = [["-m", "ruff", "check", *OURS], ["-m", "ruff", "format", "--check", *OURS], ["-m", "mypy"]]
    assert run("lint") == lint
    assert run("check") == [*lint, ["-m", "pytest"]]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("optim.lr=0.1 max_epochs=3", ["optim.lr=0.1", "max_epochs=3"]),
        (
            """'model.args={width: 64, deep: true}' data.root="my data" """,
            ["model.args={width: 64, deep: true}", "data.root=my data"],
        ),
        ("""model.args="{act: 'gelu'}" data.root='it"s'""", ["model.args={act: 'gelu'}", 'data.root=it"s']),
        (r"name=a\ b data.root='$HOME and $$'", ["name=a b", "data.root=$HOME and $$"]),
        (
            """betas=[0.9,0.95] x='' y=a#b z="a;b|c&d" --run-name=q""",
            ["betas=[0.9,0.95]", "x=", "y=a#b", "z=a;b|c&d", "--run-name=q"],
        ),
    ],
)
def test_quoted_arguments_survive(run: Callable[..., list[list[str]]], typed: str, words: list[str]) -> None:
    for target in ("train-single", "resume"):
        (call,) = run(target, "RUN=x", f"ARGS={typed}")
        assert call[-len(words) :] == words


@pytest.mark.parametrize("number", ["0", "-1", "abc", "", "2 3", "1'; exit 9", "$x"])
def test_any_number_reaches_the_launchers_own_check(run: Callable[..., list[list[str]]], number: str) -> None:
    (call,) = run("train-multigpu", f"NGPU={number}")
    assert call[call.index("--nproc") + 1] == number


@pytest.mark.parametrize("name", ["my config.yaml", 'it\'s "quoted".yaml', "$(shell false)", "a;b"])
def test_names_with_spaces_and_quotes_survive(run: Callable[..., list[list[str]]], name: str) -> None:
    assert run("train-single", f"CONFIG={name}")[0][3] == name
    assert run("plan", f"CONFIG={name}")[0][3] == name
    assert run("resume", f"RUN={name}")[0][3] == name
    assert run("eval", f"RUN={name}")[0][3] == name


def test_dry_run_of_make_shows_the_command(ready: Checkout) -> None:
    shown = ready.make("-n", "train-multigpu", "NGPU=4", "ARGS=data.root='my data'").stdout.splitlines()[-1]
    command = "exec .venv/bin/python -m launch train 'configs/mnist.yaml' --nproc '4' --launcher 'torchrun'"
    assert shown == f"{command} data.root='my data'"


def test_variables_may_come_from_the_environment(ready: Checkout) -> None:
    ready.calls()
    ready.make("train-multigpu", NGPU="3", CONFIG="a b.yaml", ARGS="x='1 2'")
    assert ready.calls() == [["-m", "launch", "train", "a b.yaml", "--nproc", "3", "--launcher", "torchrun", "x=1 2"]]


def test_variables_are_for_one_make_and_not_for_those_below_it(ready: Checkout) -> None:
    ready.make("test", "ARGS=-k x", "CONFIG=x", "NGPU=2", "RUN=x", "VENV=.venv", LAUNCHER="accelerate")
    names = {line.split("=")[0] for line in (ready.root.parent / "env").read_text().splitlines()}
    assert not names & {"ARGS", "CONFIG", "NGPU", "RUN", "LAUNCHER", "MAKEFLAGS"}
    assert "VENV" in names


@pytest.mark.parametrize("target", sorted(TARGETS - {"help", "setup", "clean"}))
def test_a_target_fails_if_its_command_fails(ready: Checkout, target: str) -> None:
    ready.calls()
    done = ready.make(target, "RUN=x", STUB_EXIT="5")  # pytest's code for "no test was found" is 5
    assert done.returncode == 2
    assert "Error 5" in done.stderr
    assert len(ready.calls()) == 1


@pytest.mark.parametrize("target", ["resume", "eval"])
@pytest.mark.parametrize("run_name", [(), ("RUN=",)])
def test_missing_run_is_one_clear_line(fresh: Checkout, target: str, run_name: tuple[str, ...]) -> None:
    done = fresh.make(target, *run_name)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"{target} needs RUN" in done.stderr
    assert fresh.calls() == []  # before anything is set up


def test_clean_keeps_runs_and_data(ready: Checkout) -> None:
    gone = [
        ".venv/bin",
        ".pytest_cache",
        ".mypy_cache",
        "lockstep.egg-info",
        "launch/__pycache__",
        "tests/a b/__pycache__",
    ]
    kept = ["runs/mnist-001/__pycache__", "data/MNIST", "benchmarks/out"]
    for name in (*gone, *kept):
        (ready.root / name).mkdir(parents=True, exist_ok=True)
    assert ready.make("clean").returncode == 0
    assert [name for name in gone if (ready.root / name).exists()] == []
    assert [name for name in kept if not (ready.root / name).exists()] == []
    assert ready.make("setup").returncode == 0


@pytest.mark.parametrize(
    ("says", "code", "passes"),
    [("12 passed in 3s", "0", True), ("1 failed, 2 passed", "1", False), ("no tests ran", "0", False)],
)
def test_ci_passes_only_if_tests_did(ready: Checkout, says: str, code: str, passes: bool) -> None:
    environment = ready.environment({"STUB_SAYS": says, "STUB_EXIT": code, "CI": "true"})
    command = ["bash", ".ci/run"]
    done = subprocess.run(
        command, cwd=ready.root, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert (done.returncode == 0) == passes
    assert says.encode() in done.stdout


# --- set-up -----------------------------------------------------------------------------------------------------------


def test_first_setup_installs_the_pinned_project_once(fresh: Checkout) -> None:
    assert fresh.make("train-single").returncode == 0
    venv, pip, train = fresh.calls()
    assert venv == ["-m", "venv", ".venv"]
    assert pip[-4:] == ["-c", ".venv/.tmp/constraints.txt", "-e", f"{fresh.root}[dev,fast]"]
    assert train[:3] == ["-m", "launch", "train"]
    assert "up to date" in fresh.make("setup").stderr
    assert fresh.make("test").returncode == 0
    assert [call[:2] for call in fresh.calls()] == [["-m", "pytest"]]
    assert not (fresh.root / ".venv" / ".tmp").exists()


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_new_pins_are_installed_over_the_old_ones(fresh: Checkout, name: str) -> None:
    fresh.make("setup")
    fresh.calls()
    (fresh.root / name).touch()
    fresh.make("setup")
    assert fresh.setup_calls() == []  # a newer time is not a change
    with (fresh.root / name).open("a") as file:
        file.write("# newer\n")
    assert fresh.make("setup").returncode == 0
    assert fresh.setup_calls() == ["pip"]


WAIT = "for i in $(seq 300); do sleep 0.1; done"  # for the signal that answers this one
INTERRUPTIONS = {
    "SIGKILL": "kill -9 $PPID",
    "Ctrl-C": f"trap 'exit 1' INT; kill -INT $PPID; {WAIT}",
    "SIGTERM": f"trap 'exit 1' INT; kill -TERM $PPID; {WAIT}",
    "failure": "exit 1",
}


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
@pytest.mark.parametrize("first", [True, False], ids=["first", "update"])
def test_interrupted_setup_is_done_anew(fresh: Checkout, interruption: str, first: bool) -> None:
    if not first:
        fresh.make("setup")
        fresh.touch_pins()
    fresh.pip_does(INTERRUPTIONS[interruption])
    interrupted = fresh.make("train-single")
    assert interrupted.returncode == 2
    assert "Traceback" not in interrupted.stderr
    assert fresh.setup_calls()[-1] == "pip"  # nothing was trained
    (fresh.root / ".venv" / "half").touch()
    fresh.pip_does("")
    assert fresh.make("setup").returncode == 0
    assert fresh.setup_calls() == ["venv", "pip"]
    assert not (fresh.root / ".venv" / "half").exists()


@pytest.mark.parametrize("lost", ["bin/python", "bin", "pyvenv.cfg bin lib", ".lockstep-setup bin"])
def test_broken_environment_is_made_anew(fresh: Checkout, lost: str) -> None:
    fresh.make("setup")
    fresh.calls()
    subprocess.run(["rm", "-rf", *lost.split()], cwd=fresh.root / ".venv", check=True)
    assert fresh.make("setup").returncode == 0
    assert fresh.setup_calls() == ["venv", "pip"]


def test_other_interpreter_makes_it_anew_but_an_activated_one_does_not(fresh: Checkout) -> None:
    fresh.make("setup")
    fresh.calls()
    activated = f"{fresh.root}/.venv/bin{os.pathsep}{os.environ['PATH']}"
    assert fresh.make("setup", PYTHON="", PATH=activated).returncode == 0
    assert fresh.make("setup", PYTHON="python", PATH=activated).returncode == 0
    assert fresh.setup_calls() == []
    stamp = json.loads((fresh.root / MARKER).read_text())
    (fresh.root / MARKER).write_text(json.dumps({**stamp, "python": "/opt/old 3.11"}))
    assert fresh.make("setup").returncode == 0
    assert fresh.setup_calls() == ["venv", "pip"]


def test_what_is_made_anew_is_not_made_by_itself(tmp_path: Path) -> None:
    assert environment.outside(tmp_path / "venv", "/opt/python3") == "/opt/python3"
    base = Path(environment.outside(tmp_path / "venv", f"{tmp_path}/venv/bin/python"))
    assert base.exists()
    assert not base.is_symlink()


def test_first_python_that_is_new_enough_is_taken(fresh: Checkout) -> None:
    old = fresh.stub.parent / "old" / "python3"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    fresh.stub.rename(fresh.stub.with_name("python3.13"))
    fresh.stub = fresh.stub.with_name("python3.13")
    path = os.pathsep.join([str(old.parent), str(fresh.stub.parent), os.environ["PATH"]])
    shutil.copy(old, old.with_name("python3.14"))
    done = fresh.make("setup", PYTHON="", PATH=path)
    assert done.returncode == 0
    assert "making .venv with python3.13" in done.stderr


def test_pip_args_are_remembered_and_leave_cuda_pins_out(fresh: Checkout) -> None:
    fresh.pip_does("cp .venv/.tmp/constraints.txt seen.txt")
    fresh.make("setup", "PIP_ARGS=--index-url 'file:///a b' -q")
    venv, pip = fresh.calls()
    assert [pip[5:8], venv[1]] == [["--index-url", "file:///a b", "-q"], "venv"]
    seen = (fresh.root / "seen.txt").read_text()
    assert "torch==" in seen
    assert "nvidia-" not in seen
    fresh.touch_pins()
    fresh.make("setup")
    (pip,) = fresh.calls()
    assert pip[5:8] == ["--index-url", "file:///a b", "-q"]
    fresh.make("setup", "PIP_ARGS=")
    assert fresh.setup_calls() == ["venv", "pip"]  # another build of torch may be there under the same version
    assert (fresh.root / "seen.txt").read_text() == (fresh.root / "constraints.txt").read_text()


def test_elsewhere_with_spaces(fresh: Checkout) -> None:
    assert fresh.make("train-single", "VENV=else where/venv").returncode == 0
    assert [call[:2] for call in fresh.calls()] == [["-m", "venv"], ["-I", "-m"], ["-m", "launch"]]
    assert not (fresh.root / ".venv").exists()


@pytest.mark.parametrize(
    "files", [["thesis.tex"], ["pyvenv.cfg", "bin/python"]], ids=["other things", "someone's environment"]
)
def test_what_is_not_ours_is_not_removed(fresh: Checkout, files: list[str]) -> None:
    place = fresh.root / "mine"
    for name in files:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(fresh.stub, place / name)
    done = fresh.make("setup", "VENV=mine")
    assert done.returncode == 2
    assert "environment error" in done.stderr
    assert [name for name in files if not (place / name).exists()] == []
    assert fresh.calls() == []


def test_empty_venv_is_refused(fresh: Checkout) -> None:
    done = fresh.make("setup", "VENV=")
    assert done.returncode == 2
    assert "VENV is empty" in done.stderr


def test_second_setup_waits_for_the_first(fresh: Checkout) -> None:
    gate = fresh.root / "gate"
    os.mkfifo(gate)
    fresh.pip_does(f"cat {shlex.quote(str(gate))} > /dev/null")
    first, second = (fresh.start("setup") for _ in range(2))
    with first, second:
        stderr = [first.stderr, second.stderr]
        lines = [pipe.readline() for pipe in stderr if pipe]
        with gate.open("w"):  # opens once one of them is in pip, and lets it go on when it closes
            assert sum("waiting" in line for line in lines) == 1
        outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert fresh.setup_calls() == ["venv", "pip"]


def test_python_without_venv_and_old_python_are_told(fresh: Checkout) -> None:
    no_venv = fresh.make("setup", STUB_NO_VENV="1")
    assert "ensurepip" in no_venv.stderr
    assert "apt install python3." in no_venv.stderr
    too_old = fresh.make("setup", "PYTHON=false")
    assert "no Python >= 3.11 among: false" in too_old.stderr
    assert (no_venv.returncode, too_old.returncode) == (2, 2)
    assert not (fresh.root / ".venv").exists()
    assert fresh.calls() == []


def test_venv_none_installs_nothing_and_lists_what_lacks(fresh: Checkout) -> None:
    pyproject = fresh.root / "pyproject.toml"
    dependencies = ["pytest>=1", "no-such-thing>=2.1", "packaging>=9999"]
    dev = ["no-such-tool", "pluggy<0.1"]
    pyproject.write_text(f"[project]\ndependencies = {dependencies}\n[project.optional-dependencies]\ndev = {dev}\n")
    trained = fresh.make("train-single", "VENV=none")
    assert trained.returncode == 2
    assert "  no no-such-thing (needed: >=2.1)\n  packaging " in trained.stderr
    assert "(needed: >=9999)" in trained.stderr
    assert "pytest" not in trained.stderr
    assert "no-such-tool" not in trained.stderr
    tested = fresh.make("test", "VENV=none")
    assert "no no-such-tool" in tested.stderr
    assert "(needed: <0.1)" in tested.stderr
    assert fresh.calls() == []


def test_venv_none_uses_the_active_environment(fresh: Checkout) -> None:
    (fresh.root / "pyproject.toml").write_text('[project]\ndependencies = ["pytest>=1"]\n')
    assert fresh.make("train-single", "VENV=none").returncode == 0
    assert fresh.make("plan", "VENV=none", PYTHON="").returncode == 0  # python3 of the PATH
    assert [call[2] for call in fresh.calls()] == ["train", "plan"]
    assert not (fresh.root / ".venv").exists()
