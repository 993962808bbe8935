"""What a training achieves of its device: TFLOP/s, and MFU where the device's peak is known."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from configs.image_sizes import training_sizes
from trainer.flops import Flops, count_flops, is_cheap
from trainer.job import Job
from trainer.peaks import peak_tflops


@dataclass(frozen=True)
class Speed:
    """Turns samples/s into TFLOP/s. MFU is model FLOPs utilisation, https://arxiv.org/abs/2204.02311, appendix B: the
    counted FLOPs a second as a share of the peak."""

    flops: Flops
    num_devices: int
    """That the samples are shared by."""
    peak_tflops: float | None = None
    """Of one device; None where it is not known."""
    gpu: str | None = None
    precision: str = "no"
    sizes: tuple[int, ...] = ()
    """Sides of the training images, where they have several: nothing is known of the FLOPs of all together."""

    def metrics(self, samples_per_s: float) -> dict[str, float]:
        """Of one device: perf/tflops, and perf/mfu as a fraction, where they are known."""
        if self.flops.unknown or self.sizes:
            return {}
        tflops = samples_per_s * self.flops.total / self.num_devices / 1e12
        return {"perf/tflops": tflops} | ({} if self.peak_tflops is None else {"perf/mfu": tflops / self.peak_tflops})

    def facts(self, samples_per_s: float) -> dict[str, Any]:
        """For result.json: per sample, and of one device. None where it is not known."""
        found, is_known = self.metrics(samples_per_s), not self.flops.unknown
        return {
            "forward_flops_per_sample": self.flops.forward if is_known else None,
            "flops_per_sample": self.flops.total if is_known else None,
            "tflops": found.get("perf/tflops"),
            "mfu": found.get("perf/mfu"),
            "peak_tflops": self.peak_tflops,
        }

    def notes(self) -> list[str]:
        """What is missing, and why."""
        if self.flops.unknown:
            return [f"no FLOPs: the network cannot be counted without data ({self.flops.unknown})"]
        if self.sizes:
            sides = f"{self.sizes[0]} to {self.sizes[-1]} pixels"
            return [f"no TFLOP/s: training images are of {sides}, and FLOPs are counted for data.image_size"]
        if self.gpu is not None and self.peak_tflops is None:
            return [f"TFLOP/s without MFU: no peak is known of {self.gpu} in {_in_words(self.precision)}"]
        return []


def describe_speed(facts: dict[str, Any]) -> str:
    """One line of what Speed.facts() says."""
    if facts["flops_per_sample"] is None:
        return "unknown"
    text = f"{facts['flops_per_sample']:,} per sample, {facts['forward_flops_per_sample']:,} of them forward"
    if facts["tflops"] is not None:
        text += f"; {facts['tflops']:.3g} TFLOP/s a process"
    return (
        text if facts["mfu"] is None else f"{text}, MFU {100 * facts['mfu']:.1f} % of {facts['peak_tflops']:g} TFLOP/s"
    )


def speed_of(job: Job) -> Speed | None:
    """Counted once, on rank 0 and where that costs nothing that is felt; None if not yet. Says what is missing."""
    if job.speed is None and job.context.is_rank_zero and is_cheap(job.context.device, job.account.busy_s()):
        job.speed = count_speed(job)
        for note in job.speed.notes():
            job.console.line(f"note: {note}")
    return job.speed


def count_speed(job: Job) -> Speed:
    context = job.context
    batch = (job.order.max_micro_batch, *job.image_shape)
    flops = count_flops(job.evaluator.model, job.model, batch, context.dtype)
    gpu, precision = job.facts["gpu"], context.precision
    peak = None if gpu is None else peak_tflops(gpu, precision, job.config.dtype, allows_tf32=_allows_tf32())
    return Speed(flops, context.world_size, peak, gpu, precision, training_sizes(job.config.data))


def _allows_tf32() -> bool:
    """Whether anything is computed in TF32 in place of fp32."""
    with contextlib.suppress(RuntimeError):  # torch tells no more by the old names once a network has used the new ones
        return torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return True


def _in_words(precision: str) -> str:
    return "fp32" if precision == "no" else precision
