"""What is said of the benchmarks' figures: remarks, the check against what is kept, the picture."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import __main__ as command
from benchmarks import check, gpu, picture
from benchmarks.check import Expectation, Expected, regressions
from benchmarks.harness import Row, Target, not_measured, ratio_row, remarks


def pairs(key: str, ratios: list[float], target: Target | None = None) -> Row:
    """A row with these ratios."""
    return ratio_row(key, {"a": ratios, "b": [1.0] * len(ratios)}, "a", "b", "s", target)


def test_figures_that_spread_are_named_afterwards() -> None:
    steady, wild = pairs("w/steady", [1.0, 1.01, 1.02]), pairs("w/wild", [0.5, 1.0, 1.5])
    (line,) = remarks([steady, wild, not_measured("w/y", "no GPU")])
    assert line.startswith("WARNING: w/wild spreads by more than 15% of its median, 1 (0.75-1.25)")


def test_a_noisy_machine_is_told_by_the_loop_against_itself() -> None:
    (line,) = remarks([pairs("tutorial/noise", [0.8, 1.0, 1.2])])
    assert "the machine alone" in line


def test_of_a_single_pair_no_spread_is_claimed() -> None:
    (line,) = remarks([pairs("w/x", [1.0]), pairs("w/y", [3.0])])
    assert "one pair" in line
    assert "w/x, w/y" in line


# --- the check against what is kept -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("better", "ratio", "fine"),
    [("higher", 8.1, True), ("higher", 7.9, False), ("lower", 11.9, True), ("lower", 12.1, False)],
)
def test_a_ratio_may_be_worse_by_the_tolerance(better: str, ratio: float, fine: bool) -> None:
    expected = Expected({"w": None}, {"w/x": Expectation(10.0, better, 0.2)})  # type: ignore[arg-type]
    assert (regressions([pairs("w/x", [ratio])], expected) == []) is fine


def test_a_regression_is_one_sentence_with_the_numbers() -> None:
    expected = Expected({"w": None}, {"w/x": Expectation(10.0, "higher", 0.2), "w/y": Expectation(1.0, "lower", 0.5)})
    (sentence,) = regressions([pairs("w/x", [5.0]), pairs("w/y", [1.0])], expected)
    assert sentence == "w/x has the ratio 5, below 8: expected is 10, and 20% worse is tolerated."


def test_what_was_not_measured_does_not_pass() -> None:
    expected = Expected({"w": None}, {"w/x": Expectation(1.0, "higher", 0.2), "w/y": Expectation(1.0, "lower", 0.2)})
    lines = regressions([not_measured("w/y", "no network")], expected)
    assert lines == ["w/x is expected, and no comparison that was run has it.", "w/y is not measured: no network."]


def test_a_target_that_must_be_met_is_one_sentence_where_it_is_not() -> None:
    expected = Expected({"w": None}, {}, ["w/x", "w/y"])
    rows = [pairs("w/x", [0.5], Target(">=", 0.9)), pairs("w/y", [1.0], Target(">=", 0.9))]
    assert regressions(rows, expected) == ["w/x is 0.5 (0.5-0.5), and the target is >= 0.9."]
    assert regressions(rows[1:], expected) == ["w/x is expected, and no comparison that was run has it."]
    assert expected.only(["other"]).met == []


def test_the_kept_ratios_are_of_comparisons_that_the_check_runs() -> None:
    expected = check.load_expected()
    assert expected.comparisons.keys() <= set(command.ALL)
    assert {key.partition("/")[0] for key in expected.rows} == expected.comparisons.keys()
    assert all(row.better in ("higher", "lower") and row.tolerance > 0 for row in expected.rows.values())


@pytest.mark.parametrize(("ratio", "code"), [(1.0, 0), (0.5, 1)])
def test_the_check_ends_with_1_where_something_got_worse(
    ratio: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = Expected(
        {"gpu": 2, "cli": None}, {"gpu/x": Expectation(1.0, "higher", 0.1), "cli/y": Expectation(1.0, "lower", 0.1)}
    )
    rounds: list[int | None] = []
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "load_expected", lambda: expected)
    monkeypatch.setattr(gpu, "measure", lambda number: rounds.append(number) or [pairs("gpu/x", [ratio, ratio])])
    assert command.main(["--check", "gpu"]) == code
    assert rounds == [2]
    assert ("gpu/x has the ratio 0.5, below 0.9" in capsys.readouterr().out) is bool(code)
    assert (tmp_path / "benchmarks/out/check.json").exists()


def test_a_check_of_what_has_no_kept_ratio_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load_expected", lambda: Expected({"gpu": None}, {}))
    assert command.main(["--check"]) == 2
    assert capsys.readouterr().err == "benchmarks: benchmarks/expected.json keeps no ratio of gpu\n"


# --- the picture ------------------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_has_a_bar_for_each_ratio() -> None:
    rows = [
        pairs("w/faster", [4.0, 5.0, 6.0], Target(">=", 2)),
        pairs("w/<slower>", [0.5, 0.5, 0.5], Target(">=", 0.9)),
        not_measured("w/none", "no GPU"),
    ]
    image = ElementTree.fromstring(picture.draw(rows, "a & b"))
    texts = [element.text for element in image.iter(f"{SVG}text")]
    assert {"a & b", "w/faster", "w/<slower>", "5 (>= 2)", "0.5 (>= 0.9)"} <= set(texts)
    assert "w/none" not in texts
    _, faster, slower = image.iter(f"{SVG}rect")
    assert (faster.get("fill"), slower.get("fill")) == (picture.COLOURS[True], picture.COLOURS[False])
    # Both bars start at 1: one goes right from there, the other left.
    one = float(faster.get("x", "nan"))
    assert float(slower.get("x", "nan")) + float(slower.get("width", "nan")) == pytest.approx(one, abs=0.2)


def test_the_axis_is_logarithmic() -> None:
    at = [picture.place(value, 0.1, 10.0) for value in (0.1, 1.0, 10.0)]
    assert at[1] - at[0] == pytest.approx(at[2] - at[1])
    assert picture.ticks(0.4, 6.0) == [0.5, 1.0, 2.0, 5.0]
    assert picture.limits([3.0]) == (pytest.approx(1 / 1.1), pytest.approx(3.3))
