"""The Python environment of the Makefile: a virtual one, made and kept up to date, or the active one, only checked.

`make setup` runs this file as a script before anything is installed, so it uses the standard library alone.
A marker inside the virtual environment says what it was made from, and names no pins while there is work in progress:
what was interrupted, at whatever moment, is made anew by the next `make`.
"""

import argparse
import fcntl
import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
MARKER = ".lockstep-setup"
EXIT_ENVIRONMENT, EXIT_INTERRUPTED, EXIT_TERMINATED = 3, 130, 143
CUDA_PACKAGES = ("nvidia-", "cuda-", "triton")


class SetupError(Exception):
    """Something about this machine or its Python that the user has to change."""


@dataclass(frozen=True)
class Stamp:
    """What a virtual environment is made from."""

    checkout: str  # the editable install points here
    python: str
    pins: str
    pip_args: str


def main() -> int:
    parser = argparse.ArgumentParser(description="Make or check the environment that the Makefile uses.")
    parser.add_argument("venv", help="folder of the virtual environment, or 'none' to check the active one")
    parser.add_argument("--python", default=sys.executable, help="makes the virtual environment")
    parser.add_argument("--pip-args", help="more options for pip, quoted as in a shell; remembered for the next time")
    parser.add_argument("--dev", action="store_true", help="with 'none': check what lint and tests need, too")
    parser.add_argument("--verbose", action="store_true", help="say so when there is nothing to do")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        if args.venv == "none":
            check_active(dev=args.dev)
        else:
            set_up(Path(args.venv).expanduser(), python=args.python, pip_args=args.pip_args)
        if args.verbose:
            say(f"{sys.executable if args.venv == 'none' else args.venv} is up to date")
    except SetupError as problem:
        say(f"environment error: {problem}")
        return EXIT_ENVIRONMENT
    except KeyboardInterrupt:
        say("interrupted; the next make takes care of what is half done")
        return EXIT_INTERRUPTED
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- a virtual environment of our own ---------------------------------------------------------------------------------


def set_up(venv: Path, *, python: str, pip_args: str | None) -> None:
    if plan_setup(venv, read_stamp(venv), wanted_stamp(venv, pip_args)) == "nothing":
        return
    with only_one_setup() as lock:
        wanted = wanted_stamp(venv, pip_args)  # again: who held the lock may have done it all
        action = plan_setup(venv, read_stamp(venv), wanted)
        if action == "nothing":
            return
        unfinished = replace(wanted, pins="")
        if action == "make":
            make_venv(venv, outside(venv, python), unfinished, lock)
        write_stamp(venv, unfinished)
        install(venv, wanted.pip_args, lock)
        write_stamp(venv, wanted)


def plan_setup(venv: Path, found: Stamp | None, wanted: Stamp) -> Literal["nothing", "update", "make"]:
    """New pins are installed over the old ones; any other difference, or doubt, makes the environment anew."""
    if found is None or not found.pins or not os.access(venv / "bin" / "python", os.X_OK):
        return "make"
    if found == wanted:
        return "nothing"
    return "update" if replace(found, pins=wanted.pins) == wanted else "make"


def wanted_stamp(venv: Path, pip_args: str | None) -> Stamp:
    """`pip_args` None: those of the last time, so that a CPU-only torch stays one."""
    if pip_args is None:
        found = read_stamp(venv)
        pip_args = found.pip_args if found else ""
    pins = hashlib.sha256(b"\0".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")))
    return Stamp(str(ROOT), python_identity(), pins.hexdigest(), pip_args)


def python_identity() -> str:
    """The same inside and outside of a virtual environment, and after a bug-fix release in the same place."""
    return f"{os.path.realpath(sys.base_prefix)} {sys.version_info.major}.{sys.version_info.minor}"


def read_stamp(venv: Path) -> Stamp | None:
    try:
        return Stamp(**json.loads((venv / MARKER).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_stamp(venv: Path, stamp: Stamp) -> None:
    aside = venv / f"{MARKER}.new"
    aside.write_text(json.dumps(asdict(stamp)))
    aside.replace(venv / MARKER)


@contextmanager
def only_one_setup() -> Iterator[int]:
    """A lock on the checkout's folder, which leaves no file. pip inherits it and holds it if its parent is killed."""
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another make is setting up this checkout; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks on folders: nobody to wait for
        yield lock
    finally:
        os.close(lock)


def outside(venv: Path, python: str) -> str:
    """An interpreter that survives the removal of `venv`."""
    inside = Path(python).parent.absolute() == (venv / "bin").absolute()
    return os.path.realpath(sys.executable) if inside else python


def make_venv(venv: Path, python: str, unfinished: Stamp, lock: int) -> None:
    check_can_make_venv(python)
    venv.mkdir(parents=True, exist_ok=True)
    check_may_empty(venv)
    say(f"making {venv} with {python} (Python {sys.version_info.major}.{sys.version_info.minor})")
    write_stamp(venv, unfinished)  # first and never removed: without it nobody could tell whose the rest is
    remove_all(child for child in venv.iterdir() if child.name != MARKER)
    if run([python, "-m", "venv", str(venv)], lock):
        raise SetupError(f"'{python} -m venv {venv}' failed; its message is above.")


def check_can_make_venv(python: str) -> None:
    if not runs(python, "import ensurepip, venv"):
        package = f"python3.{sys.version_info.minor}-venv"
        raise SetupError(
            f"{python} cannot make virtual environments: its modules 'venv' and 'ensurepip' are not installed. "
            f"On Debian and Ubuntu: apt install {package}. Or name another Python: make PYTHON=/path/to/python3"
        )


def check_may_empty(venv: Path) -> None:
    if any(venv.glob(f"{MARKER}*")) or not any(venv.iterdir()):
        return
    if venv.absolute() != ROOT / ".venv" and not (venv / "pyvenv.cfg").exists():
        raise SetupError(f"VENV={venv} has other things in it than a virtual environment. Choose another place.")
    if runs(str(venv / "bin" / "python"), ""):
        raise SetupError(
            f"{venv} works, but was not made by 'make setup'. Use it as it is (activate it, then make VENV=none ...), "
            "choose another place (VENV=...), or remove it."
        )


def remove_all(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def install(venv: Path, pip_args: str, lock: int) -> None:
    note = f"PIP_ARGS={shlex.quote(pip_args)}" if pip_args else "5.7 GB with CUDA; smaller by PIP_ARGS, see README"
    say(f"installing the pinned packages into {venv} ({note})")
    temporary = venv / ".tmp"  # inside, so that even a killed pip leaves nothing elsewhere
    temporary.mkdir(exist_ok=True)
    constraints = temporary / "constraints.txt"
    constraints.write_text(choose_pins((ROOT / "constraints.txt").read_text(), another_build=bool(pip_args)))
    pip = [str(venv / "bin" / "python"), "-I", "-m", "pip", "--disable-pip-version-check", "install"]
    command = [*pip, *split(pip_args), "-c", str(constraints), "-e", f"{ROOT}[dev,fast]"]
    if code := run(command, lock, TMPDIR=str(temporary.absolute())):
        hint = f" PIP_ARGS={shlex.quote(pip_args)} is remembered; PIP_ARGS= forgets it." if pip_args else ""
        raise SetupError(f"pip failed with exit code {code}; its message is above. The next make starts anew.{hint}")
    shutil.rmtree(temporary)


def split(pip_args: str) -> list[str]:
    try:
        return shlex.split(pip_args)
    except ValueError as error:
        raise SetupError(f"PIP_ARGS={pip_args} cannot be taken apart: {error}.") from None


def choose_pins(constraints: str, *, another_build: bool) -> str:
    """Another build of torch brings other CUDA packages, and names those itself."""
    lines = constraints.splitlines(keepends=True)
    return "".join(line for line in lines if not (another_build and line.startswith(CUDA_PACKAGES)))


def runs(python: str, code: str) -> bool:
    try:
        return subprocess.run([python, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        return False


def run(command: list[str], lock: int, **environment: str) -> int:
    with subprocess.Popen(command, env={**os.environ, **environment}, pass_fds=(lock,)) as child:
        try:
            return child.wait()
        except BaseException:  # Ctrl-C or SIGTERM: pip tidies up after itself when it is asked
            child.send_signal(signal.SIGINT)
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()
            raise


# --- the active environment -------------------------------------------------------------------------------------------


def check_active(*, dev: bool) -> None:
    if lacking := lacking_packages(read_requirements(dev=dev)):
        raise SetupError(
            f"VENV=none uses {sys.executable} as it is, and there is\n  "
            + "\n  ".join(lacking)
            + "\nInstall these there, or leave VENV=none out: then make sets up .venv."
        )


def read_requirements(*, dev: bool) -> list[str]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements: list[str] = project["dependencies"] + (project["optional-dependencies"]["dev"] if dev else [])
    return requirements


def lacking_packages(requirements: list[str]) -> list[str]:
    parse = requirement_parser()
    if parse is None:
        return ["no packaging (nor pip), which the other packages' versions are compared with"]
    return [line for requirement in map(parse, requirements) if (line := lacks(requirement))]


def requirement_parser() -> Any:
    for name in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        try:
            return importlib.import_module(name).Requirement
        except ImportError:
            continue
    return None


def lacks(requirement: Any) -> str | None:
    try:
        installed = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"no {requirement.name} (needed: {requirement.specifier})"
    release = re.match(r"[\d.]*\d|", installed)[0]  # type: ignore[index]  # vendors ship 2.8.0a0+5228986 as their 2.8.0
    return (
        None
        if requirement.specifier.contains(release)
        else f"{requirement.name} {installed} (needed: {requirement.specifier})"
    )


if __name__ == "__main__":
    sys.exit(main())
