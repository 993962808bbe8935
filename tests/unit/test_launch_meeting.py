"""The folder in which ranks meet: its own while the launcher lives, gone afterwards, however it ended."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from launch import meeting
from launch.meeting import meeting_folder

LIVES = """
import sys; sys.path[:0] = {path!r}
from launch.meeting import meeting_folder
with meeting_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_only_what_a_killed_launcher_left_is_removed(temporary: Path) -> None:
    others = [temporary / "lockstep-1-mine", temporary / "something"]
    for folder in others:
        folder.mkdir()
    command = [sys.executable, "-c", LIVES.format(path=sys.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        theirs = Path(launcher.stdout.readline().strip())
        with meeting_folder() as ours:
            assert sorted(temporary.iterdir()) == sorted([*others, theirs, ours])
        assert theirs.is_dir()
        launcher.kill()
    assert theirs.is_dir()
    with meeting_folder() as ours:
        assert sorted(temporary.iterdir()) == sorted([*others, ours])
    assert sorted(temporary.iterdir()) == sorted(others)


def test_a_folder_that_another_launcher_took_for_left_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found in the moment between its making and its locking."""
    lock, taken = meeting.fcntl.flock, []

    def once_removed(file: object, how: int) -> None:
        if not taken:
            taken.extend(temporary.iterdir())
            meeting.shutil.rmtree(taken[0])
        lock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(meeting.fcntl, "flock", once_removed)
    with meeting_folder() as folder:
        assert folder.is_dir()
        assert taken != [folder]
