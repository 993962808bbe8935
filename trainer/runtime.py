"""Rank, world, device, precision, DDP and collectives. The only file that imports Accelerate and reads torch's
environment.

Accelerate does device placement, DDP and the choice of autocast and scaler; its loaders, scheduler, optimizer wrapper
and checkpoints are not used (docs/decisions/0002-accelerate-narrowly.md).
"""

import contextlib
import datetime
import json
import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn

from configs.contract import WorkerPlan
from configs.derive import plan_batches, resolve_precision
from configs.errors import ConfigError, EnvironmentProblem
from configs.schema import RunConfig
from trainer.data.order import extend_key, key_of
from trainer.deterministic import ask_for_deterministic_kernels
from trainer.peers import PeerError

T = TypeVar("T")
_NOTHING = contextlib.nullcontext()
_PATIENCE_S = 3600.0
"""How long the ranks wait for one that loads or saves, which may take longer than any step."""


@lru_cache(maxsize=256)
def _prefix(seed: int, micro_batch: int, part: int) -> int:
    """The part of a key that is the same for all batches: hashing it takes 10 us each time, beside a tensor's work."""
    return key_of(seed, micro_batch, part)


class RunContext:
    """What a rank knows about the world it runs in.
    Every method that communicates is called by all ranks or by none."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_world_size = plan.local_world_size
        if self.world_size != plan.world_size:
            raise EnvironmentProblem(
                f"this rank sees WORLD_SIZE={self.world_size} but the plan says {plan.world_size} processes"
            )
        _check_device(plan.device, self.local_rank)
        if plan.device == "cpu":
            torch.set_num_threads(plan.threads_per_rank)
        if plan.config.virtual_shards:
            ask_for_deterministic_kernels(compiles=plan.compiles)
        self.precision = resolve_precision(plan.config, plan.device, has_amx=has_amx())
        self.dtype = getattr(torch, plan.config.dtype)
        self._scalars: dict[float, Tensor] = {}
        self._timeout = datetime.timedelta(seconds=plan.config.launch.collective_timeout_s)
        self._patient: Any = None  # a group; torch types it as a number, too
        if self.world_size > 1:
            _join(plan, self.rank, self.world_size, self._timeout)
            self._patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=_PATIENCE_S))
        self._accelerator = _build_accelerator(plan.device, self.precision)
        assert self._accelerator.num_processes == self.world_size, "Accelerate did not join the ranks"
        # Accelerate says cpu:0 where there are several ranks, to which Module.to makes copies that share nothing.
        self.device: torch.device = torch.device("cpu") if plan.device == "cpu" else self._accelerator.device
        self.scaler: torch.amp.GradScaler | None = self._accelerator.scaler

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def widest_dtype(self) -> torch.dtype:
        """For sums of losses; Metal has no float64."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        if self.precision == "no":
            return _NOTHING  # Accelerate's costs 30 us a call
        context: contextlib.AbstractContextManager[None] = self._accelerator.autocast()
        return context

    def prepare(self, model: nn.Module) -> nn.Module:
        """The module to train with: DDP around `model` where there are several ranks. One process needs no wrapper."""
        if self.world_size == 1:
            return model
        with warnings.catch_warnings():
            # torch 2.14 announces a new name for broadcast_buffers, which Accelerate 1.15 and torch 2.8 do not have.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")
            prepared: nn.Module = self._accelerator.prepare_model(model, device_placement=False)
        # DDP compares strides of dimensions of size one too, such as those of a class token, where they mean nothing.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        return prepared

    def no_sync(self, model: nn.Module, *, when: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients stay local inside, if `when`; forward and backward both belong inside."""
        if not when or self.world_size == 1:
            return _NOTHING
        context: contextlib.AbstractContextManager[None] = self._accelerator.no_sync(model)
        return context

    def scalar(self, value: float) -> Tensor:
        """`value` in the training's dtype on the device; made once, not to be changed."""
        if value not in self._scalars:
            self._scalars[value] = torch.full((), value, dtype=self.dtype, device=self.device)
        return self._scalars[value]

    def seed_dropout(self, seed: int, batch: int, part: int, micro_batch: int) -> None:
        """Key what a model draws by itself. By the rank (or virtual shard) `part` too: it cannot be keyed by sample,
        so another world size differs."""
        key = extend_key(_prefix(seed, micro_batch, part), batch) % (1 << 63)
        torch.default_generator.manual_seed(key)
        if self.device.type == "cuda":
            torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(key)
        elif self.device.type == "mps":
            torch.mps.manual_seed(key)

    def all_reduce_sum(self, tensor: Tensor, group: Any = None) -> Tensor:
        """Sum `tensor` over the ranks (of `group`) in place and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=group)
        return tensor

    def gather_tensors(self, tensor: Tensor) -> Tensor:
        """Every rank's `tensor`, of the same shape on all, stacked by rank."""
        if self.world_size == 1:
            return tensor[None]
        everyones = tensor.new_empty(self.world_size, *tensor.shape)
        dist.all_gather(list(everyones), tensor)
        return everyones

    def pair_groups(self) -> list[Any]:
        """Groups of this rank and one other: first the neighbour, then one of the neighbouring pair, and so on.
        Summing in one after another adds a power of two of ranks in a binary tree."""
        mine, distance = [], 1
        while distance < self.world_size:
            for low in range(self.world_size):
                if not low & distance:
                    pair = [low, low | distance]
                    group = dist.new_group(pair, timeout=self._timeout)  # each by all ranks, in the same order
                    mine += [group] if self.rank in (low, low | distance) else []
            distance *= 2
        return mine

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank. Through gloo and host memory: a GPU is not waited for."""
        return bool(self.all_reduce_sum(torch.tensor(int(flag)))) if self.world_size > 1 else flag

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's `value`, by rank; of a type that JSON has. torch's all_gather_object would unpickle what comes,
        and so run the code of whoever can send to a rank's port."""
        if self.world_size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(text)]), self._patient)
        longest = max(int(size) for size in sizes)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(texts, F.pad(text, (0, longest - len(text))), self._patient)
        found = zip(texts, sizes, strict=True)
        return [json.loads(bytes(text[: int(size)].tolist())) for text, size in found]

    def of_rank(self, rank: int, tensors: list[Tensor]) -> list[Tensor]:
        """That rank's values of these tensors, whatever their types; the same shapes and types on all ranks."""
        if self.world_size == 1 or not tensors:
            return tensors
        texts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        whole = torch.cat(texts)
        dist.broadcast(whole, src=rank)
        parts = whole.split([len(text) for text in texts])
        # Cloned: a part may begin where its type cannot.
        return [part.clone().view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def together(self, function: Callable[[], T]) -> T:
        """Run `function` on every rank; if it raises on any, it raises on all:
        there the error itself, elsewhere a PeerError."""
        error, result = None, None
        try:
            result = function()
        except Exception as caught:
            error = caught
        failed = self.gather_objects(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(failed):
            if text is not None:
                raise PeerError(f"rank {rank} failed: {text}")
        return result  # type: ignore[return-value]  # no error, so the function returned

    def close(self) -> None:
        """Leave the group, once every rank is there: rank 0 may host the store."""
        if self.world_size > 1:
            dist.barrier(group=self._patient)
            dist.destroy_process_group()


def has_amx() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())  # the only place where torch tells; also asks the kernel's leave


def _check_device(device: str, local_rank: int) -> None:
    if device == "cuda":
        if not torch.cuda.is_available():
            build = (
                f"torch {torch.__version__} was built for CUDA {torch.version.cuda}"
                if torch.version.cuda
                else "torch was built for CPU only"
            )
            raise EnvironmentProblem(
                f"device: cuda, but torch sees no GPU: {build}; the driver may be too old or missing (nvidia-smi)"
            )
        if local_rank >= torch.cuda.device_count():
            raise EnvironmentProblem(
                f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()}; use fewer processes"
            )
    if device == "mps" and not torch.backends.mps.is_available():
        raise EnvironmentProblem("device: mps, but torch sees no Metal GPU on this machine; use device: cpu")


def _join(plan: WorkerPlan, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
    """Enter the process group. On one node the ranks meet in a file,
    so that no port is needed and nothing listens for it."""
    backend = "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo"
    if plan.store is None:
        dist.init_process_group(backend, timeout=timeout)
        return
    store = dist.FileStore(plan.store, world_size)  # type: ignore[attr-defined]  # torch's stubs do not name it
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _build_accelerator(device: str, precision: str) -> Accelerator:
    # Buffers stay with their rank (they are averaged where they are used); the gradients need no copy of their own.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    # On a CPU only `cpu=True` makes Accelerate 1.15 see torchrun's ranks; without it each would train alone.
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision, kwargs_handlers=[ddp])
    if device == "cpu" and precision == "fp16":
        # Accelerate 1.15 would silently train in fp32: it switches fp16 on for accelerators only.
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu")
        warnings.warn(
            "fp16 on a CPU is for testing: convolutions are some hundred times slower; use mixed_precision: bf16 or no",
            stacklevel=2,
        )
    return accelerator


def check_sync_batchnorm(config: RunConfig, num_samples: int, context: RunContext) -> None:
    """Raise ConfigError where SyncBatchNorm would raise or hang.

    Its ranks exchange statistics in every forward pass, so all must make the same number of them, on a GPU each.
    """
    if context.device.type != "cuda":
        raise ConfigError(f"sync_batchnorm: true works on GPUs only and the device is {context.device.type}")
    batch = plan_batches(config, context.world_size).global_batch_size
    ragged = 0 if config.drop_last else num_samples % batch
    for what, size in (("global_batch_size", batch), ("the last batch of an epoch", ragged)):
        if size % context.world_size:
            raise ConfigError(
                f"sync_batchnorm: true needs equal shares and {what}, {size}, does not divide over "
                f"{context.world_size} processes; use drop_last: true or another global_batch_size"
            )
