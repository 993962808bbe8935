"""What the README says is true: its targets, links, presets and the output of its failing command."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def launch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=None)


def test_it_is_at_most_150_lines() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:^    |`|\$ )make ([a-z-]+)", README, re.MULTILINE))))
def test_its_targets_exist(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), target


@pytest.mark.parametrize("link", re.findall(r"\]\(([^):]+)\)", README))
def test_its_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("preset", sorted(set(re.findall(r"`([a-z0-9_]+\.yaml)`", README)) - {"config.yaml"}))
def test_its_presets_plan(preset: str, tmp_path: Path) -> None:
    planned = launch("plan", f"configs/{preset}", "--runs-dir", str(tmp_path), cwd=ROOT)
    assert planned.returncode == 0, planned.stderr
    assert list(tmp_path.iterdir()) == []


def test_its_typo_is_told_as_shown(tmp_path: Path) -> None:
    block = re.search(r"\$ make train-single ARGS=\"(.*?)\"\n(.*?)\n```", README, re.DOTALL)
    assert block is not None
    told = launch("train", "configs/mnist.yaml", *shlex.split(block[1]), "--runs-dir", str(tmp_path), cwd=ROOT)
    assert told.returncode == 2
    assert told.stderr.strip() == block[2]


def test_its_arguments_for_several_nodes_are_understood(tmp_path: Path) -> None:
    lines = re.findall(r"python -m launch (train .*--nnodes 2 .*)", README)
    assert len(lines) == 2
    for line in lines:
        arguments = line.replace("node0:", "127.0.0.1:").split()
        planned = launch(*arguments, "--dry-run", "--runs-dir", str(tmp_path), cwd=ROOT)
        assert planned.returncode == 0, planned.stderr
