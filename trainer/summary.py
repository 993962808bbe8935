"""What a run says of itself: the plan on one screen, and the result on the screen,
in result.json and in TensorBoard."""

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from configs.contract import WorkerPlan, write_atomically
from configs.derive import BatchPlan, counted, describe_lr, lr_plan, plan_batches
from configs.errors import TrainingError
from configs.run_dir import RunDir
from configs.sections import ExpectConfig
from trainer import choices
from trainer.account import TimeOfRun
from trainer.details import SCALARS
from trainer.job import Job
from trainer.other_sizes import describe_sizes
from trainer.speed import describe_speed
from trainer.tracking import as_json

GitAnswer = Callable[[], str | None]


def plan_screen(job: Job, plan: WorkerPlan, batch: BatchPlan, residency: str) -> list[str]:
    """One line a topic."""
    config, per_epoch = job.config, job.order.batches_per_epoch
    rates = "  ".join(f"{lr:.3g}" for _, lr in lr_plan(config, per_epoch))
    length = (
        f"{config.max_epochs} epochs"
        if config.max_epochs is not None
        else f"about {job.total_steps / per_epoch:.1f} epochs"
    )
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    sizes = f"{job.facts['num_train']:,} train, {job.facts['num_eval']:,} eval, {job.facts['num_classes']} classes"
    threads = f"{counted(plan.threads_per_rank, 'thread')} a rank"
    return [
        f"data       {config.data.name}: {sizes}; {residency}",
        *describe_sizes(config.data),
        f"model      {config.model.name}: {parameters:,} parameters, {config.dtype}",
        f"batch      {batch.describe()}",
        *(
            [f"bits       {config.virtual_shards} virtual shards: the same on any number of processes that divides it"]
            if config.virtual_shards
            else []
        ),
        *_smaller_than_wanted(job, plan, batch),
        f"steps      {job.total_steps} = {length} of {per_epoch}",
        f"optimizer  {config.optim.name}, {config.schedule.name}: lr at 0/25/50/75/100 % = {rates}",
        *([f"lr         {how}"] if (how := _how_lr(job)) else []),
        *choices.lines(job, plan),
        f"runtime    {plan.world_size} x {plan.device}, {threads}, torch {torch.__version__}",
    ]


def _how_lr(job: Job) -> str:
    """What the learning rate is made of, where it is not the one in the settings for all parameters."""
    parts = [describe_lr(job.config)]
    if job.config.optim.layer_decay != 1.0:
        scales = sorted({group["lr_scale"] for group in job.optimizer.param_groups})
        parts.append(f"{len(scales)} layers, the first at {scales[0]:.3g} of it")
    if (scale := job.config.optim.norm_and_bias_lr) != 1.0:
        parts.append(f"norms and biases at {scale:g} times it")
    return "; ".join(part for part in parts if part)


def _smaller_than_wanted(job: Job, plan: WorkerPlan, batch: BatchPlan) -> list[str]:
    """That micro-batches are smaller than the settings say, and what that changes: the statistics of BatchNorm."""
    wanted = plan_batches(job.config, plan.world_size).max_micro_batch
    if batch.max_micro_batch == wanted:
        return []
    norms = sum(isinstance(module, _BatchNorm) for module in job.model.modules())
    change = "the mean gradient is that of the same samples"
    if norms:
        change = f"{counted(norms, 'BatchNorm layer')} see only so many at a time, so the results differ a little"
    return [f"memory     micro-batches of {batch.max_micro_batch}, not {wanted}, which ran out of memory; {change}"]


def result_of(job: Job, plan: WorkerPlan, images_per_sec: float, in_steps: float) -> dict[str, Any]:
    """The content of result.json: fractions, seconds, images/s (of this attempt, evaluation included), and FLOP/s, by
    the images/s `in_steps`."""
    metrics: dict[str, float] = {}
    for prefix, evaluation in job.evaluations.items():
        metrics |= evaluation.metrics(prefix, in_detail=True)
    if job.state.last_train_loss is not None:
        metrics["train/loss"] = job.state.last_train_loss
    return {
        "status": "missed" if missed(job.config.expect, metrics) else "finished",
        "metrics": metrics,
        "best": {"top1": job.state.best_top1, "step": job.state.best_step},
        "step": job.state.step,
        "epoch": job.state.epoch,
        "skipped": job.state.skipped,
        "samples_seen": job.state.samples_seen,
        "wall_s": job.wall_s(),
        "stopped_early": job.stops_early(),
        "images_per_sec": images_per_sec,
        "arithmetic": None if job.speed is None else job.speed.facts(in_steps),
        "precision": job.context.precision,
        "device": plan.device,
        "world_size": job.context.world_size,
        "threads_per_rank": plan.threads_per_rank,
        "versions": versions(),
        "max_epochs": job.config.max_epochs,
        "max_steps": job.config.max_steps,
    }


def versions() -> dict[str, str]:
    packages = ("torchvision", "accelerate", "tensorboard")
    ours = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return ours | {name: importlib.metadata.version(name) for name in packages}


def ask_git() -> GitAnswer:
    """Start asking for the project's commit, now, and return a function that waits for the answer.

    It has `-dirty` where files differ from the commit, and is None outside a git checkout.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        git = subprocess.Popen(
            command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return lambda: None

    def answer() -> str | None:
        text, _ = git.communicate()
        return text.strip() if git.returncode == 0 else None

    return answer


def report_result(job: Job, run_dir: RunDir, result: dict[str, Any], spent: TimeOfRun, stragglers: list[str]) -> None:
    """Write result.json, the account of time and the HParams, show the last table. On rank 0 only."""
    write_atomically(run_dir.result, json.dumps(result | {"metrics": as_json(result["metrics"])}, indent=1))
    hparams = _flat(job.config.model_dump(mode="json")) | {"world_size": job.context.world_size}
    in_detail = {name: value for name, value in result["metrics"].items() if name.endswith(SCALARS)}
    job.tracker.show(job.state.step, spent.metrics() | in_detail)
    job.tracker.log_hparams(hparams, result["metrics"])
    rows = [
        (name, f"{100 * value:.2f} %" if "top" in name else f"{value:.4f}")
        for name, value in result["metrics"].items()
        if name not in in_detail  # told by class
    ]
    rows += [("steps", f"{result['step']}" + (f" and {result['skipped']} skipped" if result["skipped"] else ""))]
    rows += [("images/s", f"{result['images_per_sec']:,.0f}"), ("wall time", f"{result['wall_s']:.1f} s")]
    if result["arithmetic"] is not None:
        rows += [("FLOPs", describe_speed(result["arithmetic"]))]
    rows += [("time", spent.describe()), *(("ranks", line) for line in stragglers)]
    if run_dir.bad_images.exists():
        number = len(run_dir.bad_images.read_text(encoding="utf-8").splitlines())
        rows += [("bad images", f"{number} had others in their place, see {run_dir.bad_images}")]
    for name, value in rows:
        job.console.line(f"  {name:<16}{value}")
    if result["best"]["top1"] > judged_top1(result["metrics"]):
        job.console.line(f"  best top-1 was {100 * result['best']['top1']:.2f} % at step {result['best']['step']}")
    if job.config.max_epochs is not None and job.state.skipped:
        job.console.line(f"  the schedule ended {job.state.skipped} steps short: that many updates were skipped")
    job.console.line(f"done: {run_dir.path}  (tensorboard --logdir {run_dir.path.parent})")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    flat: dict[str, bool | int | float | str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            flat[prefix + name] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return flat


def judged_top1(metrics: dict[str, float]) -> float:
    """The top-1 that "best" goes by: the EMA's where there is one."""
    return metrics.get("eval/ema_top1", metrics.get("eval/top1", 0.0))


def missed(expect: ExpectConfig, metrics: dict[str, float]) -> str | None:
    """What the finished run missed of what its configuration expects; None if nothing."""
    top1 = judged_top1(metrics)
    if expect.min_top1 is not None and top1 < expect.min_top1:
        return f"top-1 is {top1:.4f} and expect.min_top1 is {expect.min_top1}"
    loss = metrics.get("train/loss", float("nan"))
    if expect.max_train_loss is not None and not loss < expect.max_train_loss:
        return f"train/loss is {loss:.4f} and expect.max_train_loss is {expect.max_train_loss}"
    return None


def check_expectations(expect: ExpectConfig, metrics: dict[str, float]) -> None:
    """Raise TrainingError if the finished run missed what its configuration expects."""
    if what := missed(expect, metrics):
        raise TrainingError(f"{what}; the run is at its end and saved")
