"""A virtual environment for each peer, made when it is needed: benchmarks/out/venvs/NAME, from peers/NAME.txt.

Each stands on the environment that runs the benchmarks: a .pth file names that one's packages, after the peer's own on
the path. So torch, 5 GB, is there once, and is the same for both sides. The peer's pins hold all the same: pip sees
both folders, takes from below what has exactly the version that is pinned, and installs the rest into the peer's own
folder, which comes first and hides what is below. What is below is never changed. 10 seconds and 50 MB for Lightning.
"""

import hashlib
import importlib.metadata
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import ROOT

PINS = ROOT / "constraints.txt"
PEERS = ROOT / "benchmarks" / "peers"
VENVS = ROOT / "benchmarks" / "out" / "venvs"
SHARED = ("torch", "torchvision")


class NotInstallable(Exception):
    """A peer cannot be installed here; one line why."""


def python_for(peer: str) -> str:
    """The interpreter of `peer`'s environment, which is made if it is missing or was made from something else.
    Raises NotInstallable."""
    venv, wanted = VENVS / peer, stamp_of(peer)
    stamp, python = venv / "stamp", venv / "bin" / "python"
    if not stamp.exists() or stamp.read_text(encoding="ascii") != wanted:
        check_shared(PINS.read_text(encoding="utf-8"))
        print(f"installing {peer} into {venv.relative_to(ROOT)} ...", file=sys.stderr, flush=True)
        shutil.rmtree(venv, ignore_errors=True)
        make(peer, venv)
        stamp.write_text(wanted, encoding="ascii")  # last: what was interrupted is made anew
    return str(python)


def packages_of(peer: str) -> Path:
    """The folder of the packages of `peer`'s own environment. Raises NotInstallable."""
    return site_packages(Path(python_for(peer)).parent.parent)


def site_packages(venv: Path) -> Path:
    return venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def stamp_of(peer: str) -> str:
    """What the environment is made from, as a hash."""
    parts = [(PEERS / f"{peer}.txt").read_bytes(), PINS.read_bytes(), sys.version.encode(), *map(str.encode, below())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def below() -> list[str]:
    """Where the packages of this interpreter are."""
    return site.getsitepackages()


def check_shared(pins: str) -> None:
    """With another torch here pip would fetch a second one of 3 GB, and the peer would be measured on that."""
    for name in SHARED:
        pinned = re.search(rf"^{name}==(\S+)$", pins, re.MULTILINE)
        assert pinned, f"constraints.txt pins no {name}"
        installed = importlib.metadata.version(name).partition("+")[0]  # +cpu, +cu130: builds of one version
        if installed != pinned[1]:
            raise NotInstallable(f"{name} is {installed} here, the peers' pin is {pinned[1]} (constraints.txt)")


def make(peer: str, venv: Path) -> None:
    """venv without pip, since this environment's pip can install into it."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(venv)], f"cannot make {venv}")
    (site_packages(venv) / "below.pth").write_text("".join(f"{path}\n" for path in below()), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(venv / "bin" / "python")]
    # The file names all that is needed, and of photographs only what is read.
    _run([*pip, "install", "--quiet", "--no-deps", "-r", str(PEERS / f"{peer}.txt")], f"pip cannot install {peer}")


def _run(command: list[str], failure: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise NotInstallable(f"{failure}: {(errors or lines)[-1].removeprefix('ERROR: ')}")
