"""The real job on one GPU: images/s and MFU by precision, ResNet-50 against timm's and a bare loop, its rate fed from
files, and seconds to an accuracy. Where there is no GPU the row says why."""

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import environments
from benchmarks.accuracy import LOCKSTEP, difference_row, final_top1
from benchmarks.gpu_rate import rate_of
from benchmarks.harness import ROOT, Row, in_turn, not_measured, ratio_row, run_python, spread
from benchmarks.jpegs import photographs
from configs.data_section import DataConfig
from configs.errors import LockstepError
from launch.topology import detect_topology
from trainer.prepare import prepare_data

ROUNDS = 3
SEEDS = 3
PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
SYNTHETIC = {"name": "benchmarks.synthetic:images", "num_classes": 10, "residency": "device"}
LARGE = {"name": "benchmarks.synthetic:large_images", "num_classes": 1000, "residency": "device"}
MODELS = {"small_resnet": SYNTHETIC, "mnist_cnn": {"name": "mnist"}}
BATCH, LARGE_BATCH, LARGE_STEPS = 512, 256, 20
BARE, TIMM = "bare loop", "timm"
COMPILED, GRAPHS = "compiled", "bare loop, compiled, CUDA graphs"


def measure(rounds: int | None = None) -> list[Row]:
    """Each variant in processes of its own."""
    reason = detect_topology(os.environ).gpu_reason
    if reason is not None:
        return [not_measured("gpu", f"torch would see no GPU here: {reason}")]
    rows = [row for model in MODELS for row in measure_model(model, "cuda", rounds or ROUNDS)]
    rows += [row for precision in ("bf16", "fp16") for row in measure_resnet50(precision, "cuda", rounds or ROUNDS)]
    return [*rows, *measure_input(rounds or ROUNDS), *time_to_accuracy()]


def measure_model(model: str, device: str, rounds: int) -> list[Row]:
    """Each precision against fp32."""
    variants: dict[str, Callable[[], float]] = {
        name: partial(images_per_s, config_of(model, MODELS[model], precision), device)
        for name, precision in PRECISIONS.items()
    }
    measured = in_turn(variants, rounds)
    return [ratio_row(f"gpu/{model}-{name}", measured, name, "fp32", "images/s") for name in ("bf16", "fp16")]


def measure_resnet50(precision: str, device: str, rounds: int, size: int = 224) -> list[Row]:
    """ResNet-50 at 224, channels_last, images on the device: Lockstep, compiled too, against the loops without it."""
    config = config_of("resnet50", LARGE, precision) | {"channels_last": True, "global_batch_size": LARGE_BATCH}
    loop = partial(loop_rate, precision, device, size)
    mfus: list[float | None] = []

    def ours() -> float:
        rate = rate_of(config, device)
        mfus.append(rate.mfu)
        return rate.images_per_s

    variants: dict[str, Callable[[], float]] = {
        LOCKSTEP: ours,
        BARE: loop,
        COMPILED: partial(images_per_s, config | {"compile": True}, device),
        GRAPHS: partial(loop, "--compile", "reduce-overhead"),
    }
    key, missing = f"gpu/resnet50-{precision}", []
    try:
        variants[TIMM] = partial(loop, "--timm", python=environments.python_for("timm"))
    except environments.NotInstallable as reason:
        missing.append(not_measured(f"{key}-timm", str(reason)))
    measured = in_turn(variants, rounds)
    rows = [ratio_row(key, measured, LOCKSTEP, BARE, "images/s"), mfu_row(f"{key}-mfu", mfus)]
    rows += [ratio_row(f"{key}-timm", measured, LOCKSTEP, TIMM, "images/s")] if TIMM in measured else missing
    return [*rows, ratio_row(f"{key}-compiled", measured, COMPILED, GRAPHS, "images/s")]


def mfu_row(key: str, mfus: list[float | None]) -> Row:
    known = [100 * mfu for mfu in mfus if mfu is not None]
    if not known:
        return not_measured(key, "no peak is known of this chip in this precision")
    return Row(key, f"{LOCKSTEP}: {spread(known).show()} %", "the chip's peak", f"{spread(known).median:.3g} %")


def loop_rate(precision: str, device: str, size: int, *more: str, python: str | None = None) -> float:
    command = ["-m", "benchmarks.peers.resnet50_loop", "--precision", precision, "--device", device, *more]
    command += ["--batch", str(LARGE_BATCH), "--steps", str(LARGE_STEPS), "--size", str(size)]
    output = run_python(command) if python is None else run_python(command, python=python)
    (line,) = [line for line in output.splitlines() if line.startswith('{"rate":')]
    return float(json.loads(line)["rate"])


def measure_input(rounds: int) -> list[Row]:
    """ResNet-50 in bf16, fed from JPEGs by loader workers against images that are on the device already."""
    try:
        root = photographs()
    except environments.NotInstallable as reason:
        return [not_measured("gpu/input", str(reason))]
    files = {"name": "imagefolder", "root": str(root), "image_size": 224, "augment": {"crop_scale": [0.08, 1.0]}}
    more = {"channels_last": True, "global_batch_size": LARGE_BATCH}
    variants: dict[str, Callable[[], float]] = {
        "from JPEGs": partial(images_per_s, config_of("resnet50", files, "bf16") | more, "cuda"),
        "on the device": partial(images_per_s, config_of("resnet50", LARGE, "bf16") | more, "cuda"),
    }
    measured = in_turn(variants, rounds)
    return [ratio_row("gpu/input", measured, "from JPEGs", "on the device", "images/s")]


def time_to_accuracy() -> list[Row]:
    """Seconds from start to exit: MNIST to 99.4 % in fp16 and fp32, whose results are compared, CIFAR-10 to 94 %."""
    with TemporaryDirectory() as folder:
        run = partial(timed_run, Path(folder))
        half, full = ([run("mnist", seed, precision) for seed in range(SEEDS)] for precision in ("fp16", "no"))
        seconds = {"fp16": [s for s, _ in half], "fp32": [s for s, _ in full]}
        rows = [
            ratio_row("gpu/mnist", seconds, "fp16", "fp32", "s, start to exit"),
            difference_row([top1 for _, top1 in half], [top1 for _, top1 in full], "gpu/mnist-top1", "fp32"),
        ]
        try:
            prepare_data(DataConfig(name="cifar10", root=str(ROOT / "data")))
        except LockstepError as reason:
            return [*rows, not_measured("gpu/cifar10", str(reason).splitlines()[0])]
        return [*rows, goal_row([run("cifar10_94", seed, "fp16") for seed in range(SEEDS)])]


def goal_row(ended: Sequence[tuple[float, float]]) -> Row:
    """CIFAR-10: seconds count only where each run got to 94 %."""
    lowest = min(top1 for _, top1 in ended)
    subject = f"{LOCKSTEP}: {spread([seconds for seconds, _ in ended]).show()} s, start to exit"
    result = f"lowest {100 * lowest:.2f} % top-1"
    return Row("gpu/cifar10", subject, "", result, lowest, ">= 94 %", lowest >= 0.94, len(ended))


def timed_run(
    runs: Path, device: str, more: tuple[str, ...], preset: str, seed: int, precision: str
) -> tuple[float, float]:
    """Seconds from start to exit and the accuracy."""
    name, start = f"{preset}-{precision}-{seed}", time.perf_counter()
    settings = [f"seed={seed}", f"mixed_precision={precision}", f"device={device}", f"data.root={ROOT / 'data'}", *more]
    run_python(
        ["-m", "launch", "train", f"configs/{preset}.yaml", *settings, "--runs-dir", str(runs), "--run-name", name]
    )
    return time.perf_counter() - start, final_top1(runs / name)


def images_per_s(config: dict[str, Any], device: str) -> float:
    return rate_of(config, device).images_per_s


def config_of(model: str, data: dict[str, Any], precision: str) -> dict[str, Any]:
    """A job in steady state."""
    return {
        "global_batch_size": BATCH,
        "max_epochs": 1_000_000,
        "mixed_precision": precision,
        "data": data,
        "model": {"name": model},
        "optim": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
        "eval": {"every_epochs": None},
        "checkpoint": {"every_epochs": None},
    }
