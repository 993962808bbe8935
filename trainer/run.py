"""The one place that builds everything, in order, and hands it to the loop. Reads like a recipe."""

import copy
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.contract import WorkerPlan, write_atomically
from configs.derive import plan_batches
from configs.errors import ConfigError
from configs.run_dir import AttemptDir, RunDir, commit_settings, step_name
from configs.schema import LossConfig
from trainer import checkpoint, resume, summary
from trainer.agreement import WithSignals
from trainer.boundary import evaluate
from trainer.console import Console
from trainer.data import workers
from trainer.data.augment import Preprocess
from trainer.data.datasets import Data, MapStyle, TensorSplit, as_image_tensor, load_data
from trainer.data.order import Order
from trainer.data.source import build_source, check_loaders, choose_residency, materialise
from trainer.evaluate import Evaluator
from trainer.faults import Pieces, faults_of, strike
from trainer.job import Job
from trainer.loop import stop_if_weights_bad, train
from trainer.metrics import LossWindow
from trainer.models import build_model
from trainer.optim import Ema, averaged_tensors, build_optimizer
from trainer.runtime import RunContext, check_sync_batchnorm
from trainer.stop import StopFlag, grace_note
from trainer.tracking import NullTracker, Tracker


@dataclass(frozen=True)
class Ending:
    """How the run ended on this rank; `checkpoint` is the one that holds its last step."""

    is_finished: bool
    step: int
    epoch: int
    checkpoint: str


@dataclass
class Run:
    """One rank of one attempt. `job` is None until everything is built."""

    plan: WorkerPlan
    run_dir: RunDir
    attempt: AttemptDir
    stop: StopFlag
    job: Job | None = None
    grace_note: str | None = None
    """Said once that a save takes too long for a stop."""

    def train(self) -> Ending:
        """Build, resume, train, evaluate, save. Raises LockstepError for what the user should know."""
        context = RunContext(self.plan)
        job, facts, screen = self.build(context)
        commit = summary.ask_git() if context.is_rank_zero else None
        last = resume.resume_newest(job, self.run_dir.checkpoints, facts)
        if context.is_rank_zero:
            commit_settings(self.run_dir, self.attempt)
        if last is not None:
            screen.append(f"resume     {last}: epoch {job.state.epoch}, step {job.state.step}")
        for line in screen:
            job.console.line(line)
        if context.is_rank_zero:
            job.tracker = Tracker(self.run_dir, job.state.logged_until(), json.dumps(facts["config"], indent=1))
        try:
            is_finished, result = self._train(job, commit)
        finally:
            job.console.close()
            job.tracker.close()
        context.close()
        if result is not None:
            summary.check_expectations(job.config.expect, result["metrics"])
        return Ending(is_finished, job.state.step, job.state.epoch, step_name(job.state.step))

    def _train(self, job: Job, commit: summary.GitAnswer | None) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the run is finished, and if it is, its result."""
        job.console.start(job.total_steps, job.state.step)
        gc.freeze()  # all that was built so far stays; only what training makes is looked through
        gc.enable()
        seen, began = job.state.samples_seen, time.monotonic()
        if not train(job):
            return False, None
        # An earlier attempt may have been killed between its last checkpoint and its result.
        if not job.evaluations and not evaluate(job):
            return False, None
        job.console.close()
        rate = (job.state.samples_seen - seen) / (time.monotonic() - began)
        result = summary.result_of(job, self.plan, rate)
        if job.context.is_rank_zero:
            self._export(job)
            summary.report_result(job, self.run_dir, result | {"git_commit": commit() if commit else None})
        return True, result

    def _export(self, job: Job) -> None:
        """model.safetensors, complete or absent, for other programs."""
        aside = self.run_dir.weights.with_suffix(".tmp")
        try:
            checkpoint.write_tensors(aside, resume.averaged_state(job, job.evaluator.model))
            aside.replace(self.run_dir.weights)
            checkpoint.sync(self.run_dir.path)
        finally:
            aside.unlink(missing_ok=True)

    def evaluate(self) -> Ending:
        """Evaluate one checkpoint; write eval.json beside the plan."""
        context = RunContext(self.plan)
        job, facts, _ = self.build(context)
        folder, which = self.run_dir.checkpoints, self.plan.checkpoint
        name = resume.load_for_evaluation(job, folder, which, facts)
        job.console.line(f"{name}, {context.world_size} x {self.plan.device}, precision {context.precision}")
        weights = {"": averaged_tensors(job.model)} | ({} if job.ema is None else {"ema_": job.ema.tensors})
        metrics: dict[str, float] = {}
        for prefix, tensors in weights.items():
            result = job.evaluator.evaluate(context, tensors)
            assert result is not None, "nothing stops it"
            metrics |= result.metrics(prefix)
            job.console.line(result.describe("EMA" if prefix else ""))
        if context.is_rank_zero:
            answer = {"checkpoint": name, "metrics": metrics}
            write_atomically(self.attempt.path / "eval.json", json.dumps(answer, indent=1))
        context.close()
        return Ending(True, job.state.step, job.state.epoch, name)

    def tidy_up(self) -> None:
        """Leave no process and no temporary file, however it ended."""
        workers.tidy_up()

    def build(self, context: RunContext) -> tuple[Job, dict[str, Any], list[str]]:
        """Everything from the data to the job, nothing restored.
        Returns (job, facts for its checkpoints, plan screen)."""
        config, device = self.plan.config, context.device
        check_same(context, config.model_dump(mode="json"), "the nodes were started with different settings")
        batch = plan_batches(config, context.world_size)
        data = context.together(lambda: load_data(config.data))
        shape = image_shape(data)
        sizes = {"train": len(data.train), "eval": len(data.evaluation), "classes": data.num_classes, "shape": shape}
        check_same(context, sizes, "the ranks see different data sets")
        model = context.together(lambda: self._model(context, data, shape))
        splits: tuple[MapStyle, MapStyle] = (data.train, data.evaluation)
        seed, classes = config.seed, data.num_classes
        if config.data.residency == "device":
            splits = context.together(
                lambda: (materialise(splits[0], seed, classes), materialise(splits[1], seed, classes))
            )
        residency, reason = choose_residency(config.data, splits, device, context.local_world_size)
        ranks, micro_batch = (context.local_world_size, context.world_size), batch.max_micro_batch
        notes = context.together(
            lambda: check_loaders(config, splits, micro_batch, ranks, streams=residency == "stream")
        )
        order = Order(
            num_samples=len(data.train),
            seed=config.seed,
            global_batch_size=batch.global_batch_size,
            drop_last=config.drop_last,
            rank=context.rank,
            world_size=context.world_size,
            max_micro_batch=batch.max_micro_batch,
            device=device if residency == "device" else torch.device("cpu"),
        )
        source, eval_source = (
            build_source(split, residency, config.data, config.seed, data.num_classes, device, self.stop)
            for split in splits
        )
        preprocess = Preprocess(config.data.augment, config.seed, data.mean, data.std, context.dtype, device)
        evaluator = Evaluator(
            model=copy.deepcopy(model).requires_grad_(False).eval(),
            trained=model,
            source=eval_source,
            preprocess=preprocess,
            loss_sum=partial(LOSSES[config.loss.name], LossConfig()),
            config=config.eval,
            num_classes=data.num_classes,
            channels_last=config.channels_last,
        )
        facts = self._facts(context, data, batch.global_batch_size)
        module, signals = prepare(context, model, compile_it=config.compile)
        self.job = job = Job(
            config=config,
            context=context,
            model=model,
            module=module,
            signals=signals,
            optimizer=build_optimizer(model, config.optim, device),
            ema=None if config.ema.half_life_samples is None else Ema(model, config.ema.half_life_samples),
            source=source,
            order=order,
            preprocess=preprocess,
            image_shape=shape,
            loss_sum=partial(LOSSES[config.loss.name], config.loss),
            evaluator=evaluator,
            tracker=NullTracker(),
            console=self._console(context),
            stop=self.stop,
            save=partial(self._save, facts),
            faults=self._faults(context),
            window=LossWindow(context),
        )
        return job, facts, summary.plan_screen(job, self.plan, batch, facts, reason) + notes

    def _console(self, context: RunContext) -> Console:
        every_s = self.plan.config.log.console_every_s
        return Console(active=context.is_rank_zero, terminal=self.plan.terminal, every_s=every_s)

    def _model(self, context: RunContext, data: Data, shape: tuple[int, int, int]) -> nn.Module:
        config = self.plan.config
        model = build_model(config.model, data.num_classes, shape, config.seed, context.dtype)
        if config.sync_batchnorm and context.world_size > 1:
            check_sync_batchnorm(config, len(data.train), context)
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if config.init_from is not None and not checkpoint.step_folders(self.run_dir.checkpoints):
            resume.load_weights(model, config.init_from)
        if config.channels_last:
            model = model.to(memory_format=torch.channels_last)
        return model.to(context.device)

    def _faults(self, context: RunContext) -> Callable[[int, Pieces], Pieces] | None:
        faults = faults_of(self.plan.config.faults, context.rank, self.attempt.path.name)
        return (lambda step, pieces: strike(faults, step, pieces, self.run_dir.checkpoints)) if faults else None

    def _facts(self, context: RunContext, data: Data, global_batch_size: int) -> dict[str, Any]:
        """What a checkpoint says of its run; resume.py compares some of it."""
        return {
            "config": self.plan.config.model_dump(mode="json"),
            "classes": None if data.classes is None else list(data.classes),
            "num_classes": data.num_classes,
            "num_train": len(data.train),
            "num_eval": len(data.evaluation),
            "global_batch_size": global_batch_size,
            "drop_last": self.plan.config.drop_last,
            "dtype": self.plan.config.dtype,
            "optimizer": self.plan.config.optim.name,
            "world_size": context.world_size,
            "device": self.plan.device,
            "precision": context.precision,
            "threads_per_rank": self.plan.threads_per_rank,
            "versions": summary.versions(),
        }

    def _save(self, facts: dict[str, Any], job: Job, is_best: bool) -> Path:
        began = time.monotonic()
        stop_if_weights_bad(job)
        job.tracker.flush()
        snapshot = resume.snapshot(job, facts)
        path = checkpoint.save(
            job.context, self.run_dir.checkpoints, snapshot, job.config.checkpoint.keep, is_best=is_best
        )
        job.console.line(f"saved {path.name}")
        note = grace_note(time.monotonic() - began, job.config.launch.grace_s)
        if note and self.grace_note is None:
            self.grace_note = note
            job.console.line(note)
        return path


def check_same(context: RunContext, mine: dict[str, Any], what: str) -> None:
    """Raise ConfigError on all ranks, saying `what`, if theirs differ from rank 0's."""
    everyones = context.gather_objects(mine)
    for rank, theirs in enumerate(everyones):
        changed = [key for key in theirs if theirs[key] != everyones[0][key]]
        if changed:
            values = ", ".join(f"{key}: {everyones[0][key]} on rank 0, {theirs[key]} on rank {rank}" for key in changed)
            raise ConfigError(f"{what}: {values}; they must be the same on all")


def prepare(context: RunContext, model: nn.Module, *, compile_it: bool) -> tuple[nn.Module, nn.Parameter | None]:
    """What is called in training: the network, or DDP around it and the ranks' signals."""
    if compile_it:
        model.compile()  # in place and before DDP, so that names stay plain
    if context.world_size == 1:
        return model, None
    wrapped = WithSignals(model, context.world_size, context.dtype).to(context.device)
    return context.prepare(wrapped), wrapped.signals


def image_shape(data: Data) -> tuple[int, int, int]:
    """(channels, height, width) of the training images."""
    image = data.train.images[0] if isinstance(data.train, TensorSplit) else as_image_tensor(data.train[0][0])
    channels, height, width = image.shape
    return channels, height, width


def cross_entropy_sum(config: LossConfig, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=config.label_smoothing)


def nll_sum(_config: LossConfig, log_probabilities: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(log_probabilities, labels, reduction="sum")


# Summed over samples: the caller divides by the count that is right for it.
LOSSES: dict[str, Callable[[LossConfig, Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy_sum,
    "nll": nll_sum,
}
