from typing import Any

import pytest

from trainer.flops import Flops
from trainer.peaks import peak_tflops
from trainer.speed import Speed, describe_speed

FLOPS = Flops(forward=2000, total=6000)
H100 = Speed(FLOPS, 4, 989.4, "NVIDIA H100 80GB HBM3", "bf16")
UNKNOWN = Speed(Flops(0, 0, "ValueError: no"), 1)


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "fp16", 312.0),
        ("A100-PCIE-40GB", "no", 156.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H200", "no", 494.7),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "fp16", 362.05),
        ("NVIDIA A10", "fp16", 125.0),
        ("Tesla T4", "fp16", 65.0),
        ("Tesla T4", "no", 8.1),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("NVIDIA GeForce RTX 3090", "bf16", 71.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        # Other chips with a similar name, a part of one, and what a chip cannot do.
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA H100 NVL", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("Tesla T4", "bf16", None),
        ("NVIDIA X9000", "no", None),
    ],
)
def test_peaks_by_name_and_precision(name: str, precision: str, tflops: float | None) -> None:
    assert peak_tflops(name, precision, "float32", allows_tf32=True) == tflops


def test_the_peak_in_fp32_is_that_of_what_computes_it() -> None:
    assert peak_tflops("NVIDIA A100-SXM4-40GB", "no", "float32", allows_tf32=False) == 19.5
    assert peak_tflops("NVIDIA A100-SXM4-40GB", "no", "float64", allows_tf32=True) is None


def test_mfu_is_the_share_of_one_devices_peak() -> None:
    # 6e3 a sample x 4e10 samples/s over 4 devices = 6e13 a second each.
    assert H100.metrics(40_000_000_000) == pytest.approx({"perf/tflops": 60.0, "perf/mfu": 60 / 989.4})
    assert Speed(FLOPS, 1).metrics(500_000_000) == pytest.approx({"perf/tflops": 3.0})
    assert UNKNOWN.metrics(500_000_000) == {}


@pytest.mark.parametrize(
    ("speed", "text"),
    [
        (H100, "6,000 per sample, 2,000 of them forward; 60 TFLOP/s a process, MFU 6.1 % of 989.4 TFLOP/s"),
        (Speed(FLOPS, 1), "6,000 per sample, 2,000 of them forward; 240 TFLOP/s a process"),
        (UNKNOWN, "unknown"),
    ],
)  # fmt: skip
def test_the_line_of_the_summary(speed: Speed, text: str) -> None:
    assert describe_speed(speed.facts(40_000_000_000)) == text


@pytest.mark.parametrize(
    ("speed", "notes"),
    [
        (H100, []),
        (Speed(FLOPS, 1), []),
        (Speed(FLOPS, 1, None, "NVIDIA X9", "no"), ["TFLOP/s without MFU: no peak is known of NVIDIA X9 in fp32"]),
        (UNKNOWN, ["no FLOPs: the network cannot be counted without data (ValueError: no)"]),
    ],
)  # fmt: skip
def test_what_is_missing_is_said(speed: Speed, notes: list[str]) -> None:
    assert speed.notes() == notes


def test_an_unknown_count_is_null_in_the_result() -> None:
    facts: dict[str, Any] = UNKNOWN.facts(40_000_000_000)
    assert set(facts.values()) == {None}
