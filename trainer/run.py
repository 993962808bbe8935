"""The one place that builds everything, in order, and hands it to the loop. Reads like a recipe."""

import copy
import gc
import json
import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from configs.beat import BOUNDARY, EVALUATION, FINISHING, SAVING
from configs.contract import WorkerPlan, write_atomically
from configs.errors import ConfigError
from configs.run_dir import AttemptDir, RunDir, commit_settings, step_name
from configs.schema import LossConfig
from trainer import checkpoint, disk, resume, summary
from trainer.account import Account, earlier_attempts, straggler_lines, time_of_run
from trainer.agreement import WithSignals
from trainer.boundary import evaluate
from trainer.console import Console
from trainer.data import workers
from trainer.data.augment import Preprocess
from trainer.data.datasets import Data, MapStyle, TensorSplit, as_image_tensor, load_data
from trainer.data.order import Order
from trainer.data.source import build_source, check_loaders, choose_residency, materialise
from trainer.evaluate import Evaluator
from trainer.faults import Faults
from trainer.guard import BadBatchError, Guard
from trainer.job import Job
from trainer.loop import train
from trainer.losses import LOSSES
from trainer.metrics import LossWindow
from trainer.models import build_model, rank_bound_layers
from trainer.optim import Ema, averaged_tensors, build_optimizer
from trainer.outcome import stop_if_weights_bad
from trainer.rollback import roll_back
from trainer.runtime import RunContext, check_sync_batchnorm
from trainer.saving import Saver
from trainer.shards import Shards
from trainer.stop import StopFlag
from trainer.tracking import NullTracker, SampleLog, Tracker


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
    account: Account = field(default_factory=Account)
    job: Job | None = None

    def train(self) -> Ending:
        """Build, resume, train, evaluate, save. Raises LockstepError for what the user should know."""
        context = RunContext(self.plan)
        self.account.beat()
        job, screen = self.build(context)
        self._watch_for_stops(context)
        commit = summary.ask_git() if context.is_rank_zero else None
        last = resume.resume_newest(job, self.run_dir.checkpoints)
        context.together(lambda: self._check_space(job) if context.is_rank_zero else None)
        self.account.start_at(job.state.step)
        if context.is_rank_zero:
            commit_settings(self.run_dir, self.attempt)
        if last is not None:
            screen.append(f"resume     {last}: epoch {job.state.epoch}, step {job.state.step}")
        for line in screen:
            job.console.line(line)
        if context.is_rank_zero:
            job.tracker = self._tracker(job)
            write_atomically(self.attempt.resumed, json.dumps({"checkpoint": last, "step": job.state.step}))
        if last is None and job.config.nonfinite == "rollback":
            job.save(job, False)  # something to go back to
        try:
            is_finished, result = self._train(job, commit)
        except BaseException:
            job.saver.abandon()
            raise
        finally:
            job.console.close()
            job.tracker.close()
        context.close()
        if result is not None:
            summary.check_expectations(job.config.expect, result["metrics"])
        return Ending(is_finished, job.state.step, job.state.epoch, step_name(job.state.step))

    def _check_space(self, job: Job) -> None:
        """Before the first step: what the run is to hold at once fits, the best and the one being written included."""
        folder, most = self.run_dir.checkpoints, job.config.checkpoint.keep + 2
        more = max(1, most - len(checkpoint.step_folders(folder)))
        each, largest = resume.needed_space(job)
        why = f"{more} more checkpoints of {each:,} bytes, up to {most} at once"
        disk.check_space(folder, more * each, largest, why)

    def _train(self, job: Job, commit: summary.GitAnswer | None) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the run is finished, and if it is, its result."""
        job.console.start(job.total_steps, job.state.step)
        gc.freeze()  # all that was built so far stays; only what training makes is looked through
        gc.enable()
        seen, began = job.state.samples_seen, time.monotonic()
        while True:
            try:
                is_finished = train(job)
                break
            except BadBatchError as error:
                job.saver.settle()
                roll_back(job, str(error), self.run_dir.checkpoints)
                if job.context.is_rank_zero:
                    job.tracker.close()
                    job.tracker = self._tracker(job)
        job.saver.settle()
        if not is_finished:
            return False, None
        # An earlier attempt may have been killed between its last checkpoint and its result.
        if not job.evaluations and not evaluate(job):
            return False, None
        self.account.enter(FINISHING)
        job.console.close()
        rate = (job.state.samples_seen - seen) / (time.monotonic() - began)
        result = summary.result_of(job, self.plan, rate)
        ranks = job.context.gather_objects(self.account.by_kind())
        if job.context.is_rank_zero:
            self._export(job)
            earlier = earlier_attempts(self.run_dir, self.attempt, self.account.first_step)
            spent = time_of_run(job.time_before, self.account.by_kind(), earlier)
            result |= {"time": spent.facts(), "git_commit": commit() if commit else None}
            on_gpu = job.context.device.type != "cpu"
            lines = straggler_lines(ranks, on_gpu=on_gpu) if len(ranks) > 1 else []
            summary.report_result(job, self.run_dir, result, spent, lines)
        return True, result

    def _watch_for_stops(self, context: RunContext) -> None:
        most, started = self.plan.config.max_time_s, self.plan.started
        left = math.inf if most is None else most - max(0.0, time.time() - started if started else 0.0)
        self.stop.watch(left, self.run_dir.stop if context.is_rank_zero else None)

    def _tracker(self, job: Job) -> Tracker:
        return Tracker(self.run_dir, job.state.logged_until(), json.dumps(job.config.model_dump(mode="json"), indent=1))

    def _export(self, job: Job) -> None:
        """model.safetensors, complete or absent, for other programs."""
        aside = self.run_dir.weights.with_suffix(".tmp")
        try:
            disk.write_tensors(aside, resume.averaged_state(job, job.evaluator.model))
            aside.replace(self.run_dir.weights)
            disk.sync(self.run_dir.path)
        finally:
            aside.unlink(missing_ok=True)

    def evaluate(self) -> Ending:
        """Evaluate one checkpoint; write eval.json beside the plan."""
        context = RunContext(self.plan)
        self.account.beat()
        job, _ = self.build(context)
        folder, which = self.run_dir.checkpoints, self.plan.checkpoint
        name = resume.load_for_evaluation(job, folder, which)
        job.console.line(f"{name}, {context.world_size} x {self.plan.device}, precision {context.precision}")
        weights = {"": averaged_tensors(job.model)} | ({} if job.ema is None else {"ema_": job.ema.tensors})
        metrics: dict[str, float] = {}
        self.account.enter(EVALUATION)
        for prefix, tensors in weights.items():
            result = job.evaluator.evaluate(context, tensors, alive=self.account.beat)
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

    def build(self, context: RunContext) -> tuple[Job, list[str]]:
        """Everything from the data to the job, nothing restored.
        Returns (job, plan screen)."""
        config, device = self.plan.config, context.device
        check_same(context, config.model_dump(mode="json"), "the nodes were started with different settings")
        batch = self.plan.batches
        data = context.together(lambda: load_data(config.data))
        self.account.beat()
        shape = image_shape(data)
        sizes = {"train": len(data.train), "eval": len(data.evaluation), "classes": data.num_classes, "shape": shape}
        check_same(context, sizes, "the ranks see different data sets")
        model = context.together(lambda: self._model(context, data, shape))
        self.account.beat()
        splits: tuple[MapStyle, MapStyle] = (data.train, data.evaluation)
        if config.data.residency == "device":
            fetch = partial(materialise, seed=config.seed, num_classes=data.num_classes, alive=self.account.beat)
            splits = context.together(lambda: (fetch(data.train), fetch(data.evaluation)))
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
            num_shards=config.virtual_shards,
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
            has_own_statistics=config.virtual_shards == 0,
        )
        facts = self._facts(context, data, model, batch.global_batch_size)
        console = self._console(context)
        saver = self._saver(context, console)
        module, signals = prepare(context, model, compile_it=config.compile, without_ddp=config.virtual_shards > 0)
        self.job = job = Job(
            config=config,
            context=context,
            model=model,
            module=module,
            signals=signals,
            shards=Shards(model, context, config.virtual_shards, batch.max_micro_batch)
            if config.virtual_shards
            else None,
            optimizer=build_optimizer(model, config.optim, device),
            ema=None if config.ema.half_life_samples is None else Ema(model, config.ema.half_life_samples),
            source=source,
            order=order,
            preprocess=preprocess,
            image_shape=shape,
            loss_sum=partial(LOSSES[config.loss.name], config.loss),
            evaluator=evaluator,
            tracker=NullTracker(),
            console=console,
            stop=self.stop,
            account=self.account,
            save=self._save,
            saver=saver,
            facts=facts,
            samples=SampleLog(self.attempt.samples(context.rank)) if config.log.sample_ids else None,
            faults=Faults(config.faults, context.rank, self.attempt.path.name, self.run_dir.checkpoints, saver.land)
            if config.faults
            else None,
            window=LossWindow(context),
            guard=Guard(config, model, self.run_dir.bad_batches, is_rank_zero=context.is_rank_zero),
        )
        return job, summary.plan_screen(job, self.plan, batch, reason) + notes

    def _console(self, context: RunContext) -> Console:
        every_s = self.plan.config.log.console_every_s
        return Console(active=context.is_rank_zero, terminal=self.plan.terminal, every_s=every_s)

    def _saver(self, context: RunContext, console: Console) -> Saver:
        config, folder = self.plan.config, self.run_dir.checkpoints
        return Saver(context, folder, config.checkpoint.keep, config.launch, console.post)

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

    def _facts(self, context: RunContext, data: Data, model: nn.Module, global_batch_size: int) -> dict[str, Any]:
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
            "rank_bound_layers": rank_bound_layers(model),
            "world_size": context.world_size,
            "device": self.plan.device,
            "gpu": torch.cuda.get_device_name(context.device) if self.plan.device == "cuda" else None,
            "precision": context.precision,
            "threads_per_rank": self.plan.threads_per_rank,
            "versions": summary.versions(),
        }

    def _save(self, job: Job, is_best: bool) -> None:
        self.account.enter(SAVING)
        job.saver.settle()
        stop_if_weights_bad(job)
        job.tracker.flush()
        job.saver.save(resume.snapshot(job), is_best=is_best, before=job.tracker.sync)
        self.account.enter(BOUNDARY)


def check_same(context: RunContext, mine: dict[str, Any], what: str) -> None:
    """Raise ConfigError on all ranks, saying `what`, if theirs differ from rank 0's."""
    everyones = context.gather_objects(mine)
    for rank, theirs in enumerate(everyones):
        changed = [key for key in theirs if theirs[key] != everyones[0][key]]
        if changed:
            values = ", ".join(f"{key}: {everyones[0][key]} on rank 0, {theirs[key]} on rank {rank}" for key in changed)
            raise ConfigError(f"{what}: {values}; they must be the same on all")


def prepare(
    context: RunContext, model: nn.Module, *, compile_it: bool, without_ddp: bool
) -> tuple[nn.Module, nn.Parameter | None]:
    """What is called in training: the network, or DDP around it and the ranks' signals."""
    if compile_it:
        model.compile()  # in place and before DDP, so that names stay plain
    if context.world_size == 1 or without_ddp:
        return model, None
    wrapped = WithSignals(model, context.world_size, context.dtype).to(context.device)
    return context.prepare(wrapped), wrapped.signals


def image_shape(data: Data) -> tuple[int, int, int]:
    """(channels, height, width) of the training images."""
    image = data.train.images[0] if isinstance(data.train, TensorSplit) else as_image_tensor(data.train[0][0])
    channels, height, width = image.shape
    return channels, height, width
