from pathlib import Path

import pytest

from trainer.console import Console


def test_lines_are_shown_on_rank_zero_only(capsys: pytest.CaptureFixture[str]) -> None:
    for active in (True, False):
        Console(active=active, terminal=None, every_s=0).line(f"rank zero: {active}")
    assert capsys.readouterr().out == "rank zero: True\n"


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(active=True, terminal=None, every_s=0)
    console.start(10, 0)
    console.progress(3, 10, 1, None)
    console.progress(4, 10, 1, 0.25)
    console.close()
    assert capsys.readouterr().out == "step 3/10  epoch 1\nstep 4/10  epoch 1  train/loss 0.2500\n"


def test_progress_waits_for_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(active=True, terminal=None, every_s=3600)
    for step in range(1000):
        console.progress(step, 1000, 0, None)
    assert capsys.readouterr().out == ""


def test_bar_goes_to_the_terminal_and_lines_to_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = tmp_path / "tty"
    terminal.touch()
    console = Console(active=True, terminal=str(terminal), every_s=0)
    console.start(10, 2)
    console.progress(5, 10, 0, 0.5)
    console.line("a fact")
    console.close()
    assert capsys.readouterr().out == "a fact\n"
    shown = terminal.read_text(encoding="utf-8")
    assert "2/10" in shown
    assert "a fact" not in shown


def test_what_another_thread_posts_comes_with_the_next_step_or_line_or_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console(active=True, terminal=None, every_s=3600)
    console.post("saved 1")
    assert capsys.readouterr().out == ""
    console.progress(1, 10, 0, None)
    assert capsys.readouterr().out == "saved 1\n"
    console.post("saved 2")
    console.line("a fact")
    console.post("saved 3")
    console.close()
    assert capsys.readouterr().out == "saved 2\na fact\nsaved 3\n"
