"""The one place that builds everything, in order. Reads like a recipe."""

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from configs.derive import BatchPlan
from configs.loss_section import LossConfig
from configs.run_dir import RunDir
from configs.schema import RunConfig
from trainer import summary
from trainer.agreement import WithSignals
from trainer.console import Console
from trainer.data.augment import Preprocess
from trainer.data.datasets import Data, MapStyle, TensorSplit, as_image_tensor, known_labels, load_data, load_elsewhere
from trainer.data.mixing import Mixing
from trainer.data.order import Order
from trainer.data.policies import Policy
from trainer.data.sampling import draw, sampling_weights
from trainer.data.source import Source, build_source, check_loaders, choose_residency, materialise
from trainer.evaluate import Evaluator
from trainer.facts import check_machines, check_same, facts_of
from trainer.faults import Faults
from trainer.guard import Guard
from trainer.job import Job
from trainer.losses import LOSSES, class_weights
from trainer.metrics import LossWindow
from trainer.models import may_draw, rank_bound_layers
from trainer.multistep import check_multistep
from trainer.network import Network, build_network, normalised_for
from trainer.optim import Ema, build_optimizer
from trainer.recompute import recompute
from trainer.runtime import RunContext
from trainer.saving import Saver
from trainer.shards import Shards
from trainer.teacher import Teacher, load_teacher
from trainer.tensors import shapes_of
from trainer.tracking import NullTracker, SampleLog

if TYPE_CHECKING:
    from trainer.run import Run


Shape = tuple[int, int, int]
"""(channels, height, width) of an image."""


def build(run: "Run", context: RunContext) -> tuple[Job, list[str]]:
    """Everything from the data to the job, nothing restored.
    Returns (job, what to show before it begins)."""
    config, device, trains = run.plan.config, context.device, run.plan.mode == "train"
    check_same(context, config.model_dump(mode="json"), "the nodes were started with different settings")
    batch = run.plan.batches
    data, shape = _same_data(run, context)
    network = context.together(lambda: _network(run, context, data, shape))
    model, channels_last = network.model, network.channels_last
    run.account.beat()
    sources, augment = _sources(run, context, data), config.data.augment
    preprocess = Preprocess(augment, config.seed, data.mean, data.std, context.dtype, device)
    drawn_by = context.together(lambda: sampling_weights(config.data, data.train, data.num_classes))
    weight = context.together(lambda: _class_weights(run, data))
    weight = weight if weight is None else weight.to(device)
    teacher = _same_teacher(run, context, data, shape) if trains else None
    evaluator = _evaluator(config, model, sources.evaluation, preprocess, data.num_classes, channels_last=channels_last)
    more = {"channels_last": channels_last, "teacher": None if teacher is None else teacher.sha256}
    facts = facts_of(run.plan, context, data, rank_bound_layers(model), batch) | more
    if config.virtual_shards:
        check_machines(context, facts)
    console = _console(run, context)
    saver = _saver(run, context, console)
    # After the evaluator has its copy, which computes nothing twice.
    lines = [*network.lines, *([recompute(model)] if config.model.checkpointing else [])]
    lines += [] if teacher is None else [teacher.line]
    module, signals = prepare(context, model, compile_it=run.plan.compiles, without_ddp=config.virtual_shards > 0)
    has_shards = config.virtual_shards > 0 and trains
    order = _order(config, context, batch, len(data.train), sources.place, drawn_by)
    run.job = job = Job(
        config=config,
        context=context,
        model=model,
        module=module,
        signals=signals,
        shards=Shards(model, context, order, console.line) if has_shards else None,
        optimizer=build_optimizer(model, config.optim, device),
        ema=None if config.ema.half_life_samples is None else Ema(model, config.ema.half_life_samples),
        source=sources.train,
        order=order,
        preprocess=preprocess,
        mixing=Mixing(augment, config.seed, data.num_classes, device) if augment.mixes else None,
        image_shape=shape,
        shapes=shapes_of(model),
        may_draw=may_draw(model),
        channels_last=channels_last,
        why_layout=network.why_layout,
        frozen_norms=network.frozen_norms,
        is_compiled=run.plan.compiles,
        loss_sum=partial(LOSSES[config.loss.name], config.loss, weight),
        teacher=teacher,
        evaluator=evaluator,
        tracker=NullTracker(),
        console=console,
        stop=run.stop,
        account=run.account,
        saver=saver,
        facts=facts,
        files_may_differ=run.plan.allow_changes or run.plan.mode == "eval",
        trains=trains,
        samples=SampleLog(run.attempt.samples(context.rank)) if config.log.sample_ids else None,
        faults=_faults(run, context, saver),
        window=LossWindow(context),
        guard=Guard(config, model, run.run_dir.bad_batches, is_rank_zero=context.is_rank_zero),
    )
    if not job.trains:
        return job, list(data.notes)
    if config.steps_per_execution > 1:
        check_multistep(job)
    return job, [*summary.plan_screen(job, run.plan, batch, sources.reason), *lines, *data.notes, *sources.notes]


def _network(run: "Run", context: RunContext, data: Data, shape: Shape) -> Network:
    checkpoints, trains = run.run_dir.checkpoints, run.plan.mode == "train"
    return build_network(run.plan.config, context, data, shape, checkpoints, trains=trains)


def _same_data(run: "Run", context: RunContext) -> tuple[Data, Shape]:
    """On all ranks; with the shape of its training images."""
    data = context.together(lambda: _data(run))
    run.account.beat()
    shape = image_shape(data)
    data = context.together(lambda: normalised_for(run.plan.config, data, shape[0]))
    sizes = {"train": len(data.train), "eval": len(data.evaluation), "classes": data.num_classes, "shape": shape}
    check_same(context, sizes | {"files": data.files}, "the ranks see different data sets")
    return data, shape


def _same_teacher(run: "Run", context: RunContext, data: Data, shape: Shape) -> Teacher | None:
    teacher = context.together(lambda: load_teacher(run.plan.config, context, data, shape))
    if teacher is not None:
        check_same(context, {"loss.teacher": teacher.sha256}, "the ranks see different weights of the teacher")
    return teacher


def _data(run: "Run") -> Data:
    config, elsewhere = run.plan.config.data, run.plan.eval_data
    if elsewhere is not None:
        bad_images = RunDir(run.attempt.path).bad_images  # the run's own tells of its own images
        return load_elsewhere(config, Path(elsewhere), run.run_dir.classes, bad_images, run.account.beat)
    return load_data(config, run.run_dir.bad_images, run.account.beat)


def _class_weights(run: "Run", data: Data) -> Tensor | None:
    """Of training alone: a folder to evaluate may lack a class that would have to be weighed."""
    if run.plan.mode == "eval":
        return None
    config = run.plan.config
    is_counted = config.loss.class_weights == "balanced"
    labels = known_labels(data.train, data.num_classes, config.data.name) if is_counted else None
    return class_weights(config.loss, data.num_classes, labels)


def _faults(run: "Run", context: RunContext, saver: Saver) -> Faults | None:
    faults = run.plan.config.faults
    return Faults(faults, context.rank, run.attempt.number, run.run_dir.checkpoints, saver.land) if faults else None


@dataclass(frozen=True)
class _Sources:
    """Where the batches of both splits are made."""

    train: Source
    evaluation: Source
    place: torch.device
    """Of the sample indices."""
    reason: str
    notes: list[str]


def _sources(run: "Run", context: RunContext, data: Data) -> _Sources:
    plan, config, device = run.plan, run.plan.config, context.device
    splits = _splits(run, context, data)
    residency, reason = choose_residency(config.data, splits, device, context.local_world_size, plan.num_workers)
    notes = context.together(lambda: check_loaders(plan, splits, streams=residency == "stream"))
    augment = config.data.augment
    policy = Policy(augment) if augment.changes_single_images and plan.mode == "train" else None
    train, evaluation = (
        build_source(split, residency, plan.num_workers, config.seed, data.num_classes, device, run.stop, each)
        for split, each in zip(splits, (policy, None), strict=True)
    )
    place = device if residency == "device" else torch.device("cpu")
    return _Sources(train, evaluation, place, reason, notes)


def _splits(run: "Run", context: RunContext, data: Data) -> tuple[MapStyle, MapStyle]:
    """Training and evaluation; in memory already where they must be resident."""
    config = run.plan.config
    if config.data.residency != "device":
        return data.train, data.evaluation
    fetch = partial(materialise, seed=config.seed, num_classes=data.num_classes, alive=run.account.beat)
    return context.together(lambda: (fetch(data.train), fetch(data.evaluation)))


def _order(
    config: RunConfig,
    context: RunContext,
    batch: BatchPlan,
    num_samples: int,
    device: torch.device,
    weights: Tensor | None,
) -> Order:
    return Order(
        num_samples=num_samples,
        seed=config.seed,
        global_batch_size=batch.global_batch_size,
        drop_last=config.drop_last,
        rank=context.rank,
        world_size=context.world_size,
        max_micro_batch=batch.max_micro_batch,
        device=device,
        num_shards=config.virtual_shards,
        unit=config.data.augment.unit,
        repeats=config.data.augment.repeats,
        draw=None if weights is None else partial(draw, weights, config.seed),
    )


def _evaluator(
    config: RunConfig,
    model: nn.Module,
    source: Source,
    preprocess: Preprocess,
    num_classes: int,
    *,
    channels_last: bool,
) -> Evaluator:
    return Evaluator(
        model=copy.deepcopy(model).requires_grad_(False).eval(),
        trained=model,
        source=source,
        preprocess=preprocess,
        loss_sum=partial(
            LOSSES[config.loss.name], LossConfig(name=config.loss.name, bce_sum=config.loss.bce_sum), None
        ),
        config=config.eval,
        num_classes=num_classes,
        channels_last=channels_last,
        has_own_statistics=config.virtual_shards == 0,
        loss_name=config.loss.name,
        seed=config.seed if may_draw(model) else None,
    )


def _console(run: "Run", context: RunContext) -> Console:
    every_s = run.plan.config.log.console_every_s
    return Console(active=context.is_rank_zero, terminal=run.plan.terminal, every_s=every_s)


def _saver(run: "Run", context: RunContext, console: Console) -> Saver:
    config, folder = run.plan.config, run.run_dir.checkpoints
    return Saver(context, folder, config.checkpoint.keep, config.launch, console.post)


def prepare(
    context: RunContext, model: nn.Module, *, compile_it: bool, without_ddp: bool
) -> tuple[nn.Module, nn.Parameter | None]:
    """What is called in training: the network, or DDP around it and the ranks' signals."""
    if compile_it:
        # In place and before DDP, so that names stay plain. Shards of two sizes: each gets kernels of its own, or they
        # would depend on which a rank sees first.
        model.compile(dynamic=False if without_ddp else None)
    if context.world_size == 1 or without_ddp:
        return model, None
    wrapped = WithSignals(model, context.world_size, context.dtype).to(context.device)
    return context.prepare(wrapped), wrapped.signals


def image_shape(data: Data) -> Shape:
    """(channels, height, width) of the training images."""
    image = data.train.images[0] if isinstance(data.train, TensorSplit) else as_image_tensor(data.train[0][0])
    channels, height, width = image.shape
    return channels, height, width
