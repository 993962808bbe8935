"""What `auto` means for this network on this device, by rule, and the lines of the plan screen that say why."""

from torch import nn

from configs.contract import WorkerPlan
from configs.derive import counted, why_precision, with_reason
from configs.schema import RunConfig
from trainer.job import Job
from trainer.runtime import has_amx


def choose_channels_last(config: RunConfig, model: nn.Module, precision: str) -> tuple[bool, str]:
    """Whether images and weights lie in channels_last, and why; the reason is empty where it is the user's word.

    In 16 bit the kernels of cuDNN's tensor cores and of oneDNN want it. In fp32 on a CPU it depends on the network
    (docs/decisions/0010-auto-settings.md).
    """
    if config.channels_last != "auto":
        return config.channels_last, ""
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    if not convolutions:
        return False, "auto: no convolutions"
    found = f"auto: {counted(convolutions, 'convolution')} in {'fp32' if precision == 'no' else precision}"
    return precision != "no", found


def lines(job: Job, plan: WorkerPlan) -> list[str]:
    """One a choice."""
    config, device = job.config, job.context.device.type
    precision = with_reason(job.context.precision, why_precision(config, plan.device, has_amx=has_amx()))
    layout = with_reason("channels_last" if job.channels_last else "contiguous", job.why_layout)
    found = [f"precision  {precision}", f"layout     {layout}", f"update     {_update(job, device)}"]
    if job.signals is not None:
        found.append("gradients  views of DDP's buckets; summed once an update, not in each micro-batch")
    if config.compile:
        why = plan.compile_reason if config.compile == "auto" else ""
        found.append(f"compile    {with_reason('on' if plan.compiles else 'off', why)}")
    if (count := config.steps_per_execution) > 1:
        found.append(f"updates    {count} in one compiled call, where nothing is due before its end")
    return found


def _update(job: Job, device: str) -> str:
    if job.config.optim.name not in ("sgd", "adam", "adamw"):
        return f"{job.config.optim.name}, by functions of torch's and timm's; waits for the outcome of each step"
    kernels = "one fused kernel" if job.optimizer.fused else "foreach kernels"
    automatic = f"auto: torch has {'one' if job.optimizer.fused else 'no fused one'} for {device}"
    return with_reason(kernels, automatic if job.config.optim.fused is None else "")
