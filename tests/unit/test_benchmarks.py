"""The harness of the benchmarks: pairs, targets, table, files. What it measures is not asserted anywhere."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import cli, gpu, harness
from benchmarks.accuracy import difference_row
from benchmarks.gpu_rate import Rate, rate_of
from benchmarks.harness import Row, Target, in_turn, not_measured, ratio_row, spread, table
from benchmarks.marked_net import MARKED, MARKS, MarkedNet, read_marks
from benchmarks.synthetic import images
from configs.errors import ConfigError

MACHINE = {"date": "today", "cpu": "a CPU", "cores": 2, "python": "3", "versions": {"torch": "2"}}


def test_each_variant_is_measured_once_a_round() -> None:
    seen: list[str] = []

    def note(name: str) -> float:
        seen.append(name)
        return float(len(seen))

    measured = in_turn({"a": lambda: note("a"), "b": lambda: note("b")}, 3)
    assert seen == ["a", "b"] * 3
    assert measured == {"a": [1.0, 3.0, 5.0], "b": [2.0, 4.0, 6.0]}


def test_the_ratio_is_the_median_over_pairs_not_the_ratio_of_medians() -> None:
    row = ratio_row("w/x", {"a": [10.0, 20.0, 90.0], "b": [1.0, 4.0, 10.0]}, "a", "b", "s")
    assert row.value == 9.0
    assert row.pairs == 3
    assert row.is_met is None


def test_quartiles() -> None:
    assert spread([4.0]) == harness.Spread(4.0, 4.0, 4.0, 1)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == harness.Spread(3.0, 2.0, 4.0, 5)


@pytest.mark.parametrize(("sense", "met"), [(">=", False), ("<=", True)])
def test_a_target_has_a_direction(sense: str, met: bool) -> None:
    target = Target(sense, 1.1)  # type: ignore[arg-type]
    row = ratio_row("w/x", {"a": [1.0], "b": [1.0]}, "a", "b", "s", target)
    assert row.is_met is met
    assert f"| {sense} 1.1 | {'yes' if met else '**no**'} |" in table([row])


@pytest.mark.parametrize(("seconds", "met"), [(0.2, True), (0.4, False)])
def test_a_limit_is_for_the_time_itself_whatever_the_ratio(seconds: float, met: bool) -> None:
    row = ratio_row("w/x", {"a": [seconds], "b": [0.1]}, "a", "b", "s", limit=Target("<=", 0.3))
    assert (row.target, row.is_met) == ("<= 0.3 s", met)
    assert row.value == pytest.approx(seconds / 0.1)


def test_the_table_is_markdown() -> None:
    row = ratio_row("w/x", {"a": [1.0], "b": [2.0]}, "a", "b", "s")
    lines = table([row, not_measured("w/y", "no GPU")]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert set(lines[1]) == set("| -")
    assert "not measured: no GPU" in lines[3]


def test_a_busy_machine_is_said() -> None:
    assert "WARNING" not in harness.header(MACHINE | {"busy_cores": 0.2})
    assert "WARNING" in harness.header(MACHINE | {"busy_cores": 1.5})


def test_the_machine_is_described() -> None:
    text = harness.header(harness.describe_machine())
    assert f"torch {torch.__version__.partition('+')[0]}" in text
    assert re.search(r"cores, \d+\.\d\d of them busy before the start", text)


def test_busy_cores_are_those_of_the_time_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 ticks of two cores 50 were idle: one and a half are busy."""
    ticks = iter([(1000, 5000, 2), (1050, 5200, 2)])
    monkeypatch.setattr(harness, "_ticks", lambda: next(ticks))
    assert harness.busy_cores(0.0) == pytest.approx(1.5)


@pytest.mark.parametrize("arguments", [["nothing"], ["gpu", "--rounds", "0"]])
def test_what_is_unknown_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_every_comparison_is_a_module() -> None:
    for name in command.ALL:
        assert (harness.ROOT / "benchmarks" / f"{name}.py").exists()


def test_a_missed_target_is_told_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("gpu/x", "a", "b", "0.5", 0.5, ">= 1", False, 3, {"a": [1.0]})]
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "measure", lambda rounds: rows)
    assert command.main(["gpu"]) == 0
    assert "| **no** |" in capsys.readouterr().out
    saved = json.loads((tmp_path / "benchmarks/out/gpu.json").read_text())
    assert saved["rows"][0]["key"] == "gpu/x"
    assert saved["machine"]["cores"] >= 1


def test_a_comparison_that_fails_leaves_the_others_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(rounds: int | None) -> list[Row]:
        raise RuntimeError("the peer ended with 1:\nits traceback")

    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(cli, "measure", fails)
    monkeypatch.setattr(gpu, "measure", lambda rounds: [Row("gpu/x", "a", "b", "0.5", 0.5)])
    assert command.main(["cli", "gpu"]) == 0
    assert "not measured: RuntimeError: the peer ended with 1:" in capsys.readouterr().out
    saved = json.loads((tmp_path / "benchmarks/out/cli-gpu.json").read_text())
    assert [row["key"] for row in saved["rows"]] == ["cli", "gpu/x"]


def test_without_a_gpu_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoGpu:
        gpu_reason = "no NVIDIA driver"

    monkeypatch.setattr(gpu, "detect_topology", lambda environ: NoGpu)
    (row,) = gpu.measure()
    assert "no NVIDIA driver" in row.result
    assert row.is_met is None


def test_equal_accuracy_means_within_the_noise_of_the_seeds() -> None:
    ours, theirs = [0.90, 0.91, 0.92], [0.91, 0.92, 0.90]
    assert difference_row(ours, theirs).is_met
    assert not difference_row([value - 0.03 for value in ours], theirs).is_met
    of_one_seed = difference_row([0.9], [0.9])
    assert of_one_seed.details["standard_error"] == math.inf
    assert of_one_seed.is_met is None


def test_a_command_that_fails_shows_its_output() -> None:
    assert harness.run_python(["-c", "print('fine')"]) == "fine\n"
    with pytest.raises(RuntimeError, match=r"(?s)ended with 1:.*no such thing"):
        harness.run_python(["-c", "raise SystemExit('no such thing')"])


def test_the_clock_notes_when_training_passes_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = tmp_path / "marks"
    monkeypatch.setenv(MARKS, str(marks))
    monkeypatch.setenv(MARKED, "2,4")
    net, batch = MarkedNet(), torch.zeros(2, 1, 28, 28)
    net.eval()
    net(batch), net(batch)
    net.train()
    net(batch)
    assert not marks.exists()
    net(batch), net(batch)
    assert read_marks(marks).keys() == {2}
    net(batch), net(batch)
    times = read_marks(marks)
    assert times.keys() == {2, 4}
    assert 0 < times[2] <= times[4]


def test_the_clock_is_that_of_rank_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARKS, str(tmp_path / "marks"))
    monkeypatch.setenv("RANK", "1")
    net = MarkedNet()
    net(torch.zeros(2, 1, 28, 28)), net(torch.zeros(2, 1, 28, 28))
    assert not (tmp_path / "marks").exists()


def test_synthetic_images_are_the_same_each_time() -> None:
    first, again = images(True), images(True)
    assert first.images.shape == (25_600, 3, 32, 32)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.images[:500], images(False).images)


# --- the GPU's, as far as a CPU can tell that they run ----------------------------------------------------------------


def test_the_rate_of_a_job_is_measured_in_a_process_of_its_own() -> None:
    data = {"name": "benchmarks.synthetic:images", "num_classes": 10, "residency": "device"}
    config = gpu.config_of("mlp", data, "no") | {"global_batch_size": 8}
    rate = rate_of(config, "cpu", steps=1)
    assert rate.images_per_s > 0
    assert rate.mfu is None


def test_the_bare_loop_of_resnet50_tells_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LARGE_BATCH", 2)
    monkeypatch.setattr(gpu, "LARGE_STEPS", 1)
    assert gpu.loop_rate("bf16", "cpu", 32) > 0


def test_resnet50_is_compared_with_each_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"": 2.0, "--compile reduce-overhead": 8.0, "--timm": 5.0}
    monkeypatch.setattr(gpu, "rate_of", lambda config, device: Rate(10.0, 0.4))
    monkeypatch.setattr(gpu, "loop_rate", lambda precision, device, size, *more, python=None: rates[" ".join(more)])
    monkeypatch.setattr(gpu.environments, "python_for", lambda name: name)
    rows = {row.key: row for row in gpu.measure_resnet50("bf16", "cuda", 2)}
    ratios = {key.removeprefix("gpu/resnet50-bf16"): row.value for key, row in rows.items()}
    assert ratios == {"": 5.0, "-mfu": None, "-timm": 2.0, "-compiled": 1.25}
    assert rows["gpu/resnet50-bf16-mfu"].result == "40 %"


def test_cifar10_without_its_data_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(config: object) -> None:
        raise ConfigError("no CIFAR-10 in data")

    monkeypatch.setattr(gpu, "timed_run", lambda runs, preset, seed, precision: (10.0, 0.99 + seed / 1000))
    monkeypatch.setattr(gpu, "prepare_data", missing)
    mnist, top1, cifar10 = gpu.time_to_accuracy()
    assert (mnist.value, top1.is_met, cifar10.result) == (1.0, True, "not measured: no CIFAR-10 in data")
    assert gpu.goal_row([(9.0, 0.941), (8.0, 0.939)]).is_met is False
