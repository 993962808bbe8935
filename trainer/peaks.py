"""What a GPU can do at most, by the vendor's data sheet: dense, without the doubling that 2:4 sparsity is sold with.

TFLOP/s of tensor cores in 16 bit with sums in fp32, as training has them, of tensor cores in TF32, and of fp32. From
NVIDIA: A100 Tensor Core GPU data sheet; H100 Tensor Core GPU architecture white paper (SXM5 and PCIe) and data sheet;
H200, L4, L40S and A10 Tensor Core GPU data sheets; T4 data sheet; V100 data sheet (SXM2, PCIe); GA102 white paper,
table 2 (RTX 3090); Ada GPU architecture white paper, appendix A (RTX 4090). Where a sheet gives only the sparse figure,
it is half of that. A name has to match as a whole: an RTX 3090 Ti, an A10G or a MIG slice is another chip.
"""

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """Dense TFLOP/s."""

    half: float
    tf32: float | None
    fp32: float
    has_bf16: bool = True


PEAKS = {
    r"A100[ -](SXM4-[48]0GB|PCIE-[48]0GB|80GB PCIe)": Peak(312.0, 156.0, 19.5),
    r"H100 80GB HBM3": Peak(989.4, 494.7, 66.9),
    r"H100 PCIe": Peak(756.0, 378.0, 51.2),
    r"H200": Peak(989.4, 494.7, 66.9),
    r"L40S": Peak(362.05, 183.0, 91.6),
    r"L4": Peak(121.0, 60.0, 30.3),
    r"A10": Peak(125.0, 62.5, 31.2),
    r"T4": Peak(65.0, None, 8.1, has_bf16=False),
    r"V100-SXM2-(16|32)GB": Peak(125.0, None, 15.7, has_bf16=False),
    r"V100-PCIE-(16|32)GB": Peak(112.0, None, 14.0, has_bf16=False),
    r"GeForce RTX 3090": Peak(71.0, 35.6, 35.6),
    r"GeForce RTX 4090": Peak(165.2, 82.6, 82.6),
}
"""By the name that torch.cuda.get_device_name gives, without its first word."""


def peak_tflops(name: str, precision: str, dtype: str, *, allows_tf32: bool) -> float | None:
    """TFLOP/s of the chip `name` in `precision`, one of no, fp16, bf16; None where no data sheet here says it.

    In fp32 it is that of TF32 where anything may be computed in it, as convolutions are by default.
    """
    chip = re.sub(r"^(NVIDIA|Tesla) ", "", name)
    peak = next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, chip)), None)
    if peak is None or dtype != "float32" or (precision == "bf16" and not peak.has_bf16):
        return None
    if precision != "no":
        return peak.half
    return peak.tf32 if allows_tf32 and peak.tf32 is not None else peak.fp32
