"""PURE: (config, topology, request) -> LaunchPlan, or all the reasons why not. Reads, writes and starts nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.contract import WorkerPlan
from configs.derive import WORKER_SHM_BYTES, counted, plan_batches, resolve_workers, steps_per_epoch
from configs.errors import ConfigError, EnvironmentProblem
from configs.known_data import KNOWN_DATA
from configs.run_dir import AttemptDir, RunDir
from configs.schema import RunConfig
from launch import backends
from launch.backends import Launcher
from launch.follow import shown
from launch.rank_environment import STRAY, rank_environment
from launch.request import Request
from launch.topology import Topology

Device = Literal["cuda", "cpu", "mps"]


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that starting the ranks takes, and nothing else does."""

    worker: WorkerPlan
    device_line: str
    threads_note: str
    nnodes: int
    node_rank: int
    argv: list[str]
    environment: dict[str, str]
    """Set for every process below the launcher."""
    removed: list[str]
    """Stray variables that are taken out."""
    files: dict[str, str]
    """Written into the attempt folder, by name."""
    attempt: AttemptDir
    cwd: Path
    warnings: list[str]

    @property
    def config(self) -> RunConfig:
        return self.worker.config

    def child_environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in environ.items() if not STRAY.fullmatch(name)} | self.environment


def plan_launch(config: RunConfig, topology: Topology, request: Request) -> LaunchPlan:
    """Decide device, threads, command and environment. Raises ConfigError or EnvironmentProblem."""
    device = plan_device(config, topology, request.nproc)
    nproc = plan_nproc(device, topology, request)
    nnodes = request.nodes.nnodes if request.nodes else 1
    _check_fits(config, device, nproc, nnodes, request)
    backend: Launcher | Literal["direct"] = request.launcher
    if nproc * nnodes == 1 and request.launcher != "accelerate":
        backend = "direct"
    _check_faults(config, request.attempt, nproc * nnodes)
    workers, _ = resolve_workers(config, device, topology.cores, nproc, topology.shm_bytes)
    threads, threads_note = plan_threads(
        config, topology, nproc, request.environ, num_loaders(config, workers), on_cpu=device == "cpu"
    )
    worker = WorkerPlan(
        mode=request.mode,
        config=config,
        launcher=backend,
        device=device,
        world_size=nproc * nnodes,
        local_world_size=nproc,
        threads_per_rank=threads,
        store=str(request.meeting / "ranks") if request.nodes is None and nproc > 1 else None,
        terminal=request.terminal,
        started=request.started,
        checkpoint=request.checkpoint,
        eval_data=request.eval_data,
        eval_changes=request.eval_changes,
        allow_changes=request.allow_changes,
        max_micro_batch=request.max_micro_batch,
        auto_workers=workers,
    )
    return LaunchPlan(
        worker=worker,
        device_line=_device_line(worker, topology, nnodes),
        threads_note=threads_note,
        nnodes=nnodes,
        node_rank=request.nodes.node_rank if request.nodes else 0,
        argv=_command(worker, request),
        environment=rank_environment(worker, topology, request),
        removed=sorted(name for name in request.environ if STRAY.fullmatch(name)),
        files=_files(worker),
        attempt=request.attempt,
        cwd=request.cwd,
        warnings=[*_warnings(worker, topology), *_memory_note(worker, request), *_changes_note(worker)],
    )


def plan_device(config: RunConfig, topology: Topology, nproc: int | Literal["auto"] = 1) -> Device:
    """What `device` means on this machine."""
    if config.device == "cpu":
        return "cpu"
    if config.device == "mps":
        if not topology.has_mps:
            raise EnvironmentProblem(f"device=mps needs Apple silicon and this is {topology.system}; use device=auto")
        if nproc not in (1, "auto"):
            raise ConfigError(f"device=mps runs one process, not {nproc}; use NGPU=1 (--nproc 1) or device=cpu")
        return "mps"
    if topology.num_gpus:
        return "cuda"
    if config.device == "cuda":
        raise EnvironmentProblem(
            f"device=cuda, but torch sees no GPU: {topology.gpu_reason}; use device=auto or device=cpu"
        )
    fits_metal = nproc in (1, "auto") and config.dtype == "float32" and not config.virtual_shards
    return "mps" if topology.has_mps and fits_metal else "cpu"


def plan_nproc(device: Device, topology: Topology, request: Request) -> int:
    """Processes on this node; on GPUs never more than there are."""
    if request.nproc == "auto":
        return topology.num_gpus if device == "cuda" else 1
    if device == "cuda" and request.nproc > topology.num_gpus:
        visible = topology.cuda_visible_devices
        because = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise EnvironmentProblem(
            f"asked for {counted(request.nproc, 'process')}, {counted(topology.num_gpus, 'GPU')} visible{because}; "
            f"use NGPU={topology.num_gpus} (--nproc {topology.num_gpus}) or device=cpu"
        )
    return request.nproc


def _check_fits(config: RunConfig, device: Device, nproc: int, nnodes: int, request: Request) -> None:
    """Raise one ConfigError with everything that does not fit together."""
    problems = []
    if request.launcher != "torchrun" and nnodes > 1:
        problems.append(f"--launcher {request.launcher} is for one machine; use --launcher torchrun for several nodes")
    elif request.launcher == "accelerate" and nproc > 1 and device != "cuda":
        problems.append(
            f"--launcher accelerate cannot run {nproc} processes on a CPU: Accelerate 1.15 starts one process there, "
            "whatever is asked; use --launcher torchrun"
        )
    if config.launch.max_restarts and nnodes > 1:
        problems.append(
            f"launch.max_restarts: {config.launch.max_restarts} is for one node: the launchers of several would judge "
            "by different failures and wait for each other; use launch.max_restarts=0 and have the scheduler start all"
        )
    if config.sync_batchnorm and device != "cuda" and request.mode == "train":
        problems.append(f"sync_batchnorm: true is for GPUs and the device is {device}; use sync_batchnorm: false")
    if config.virtual_shards and device == "mps" and request.mode == "train":
        problems.append("virtual_shards needs equal bits each time, which Metal does not promise; use device=cpu")
    try:
        batches = plan_batches(config, 1 if request.mode == "eval" else nproc * nnodes)
        if known := KNOWN_DATA.get(config.data.name):
            steps_per_epoch(known.num_train, batches.global_batch_size, drop_last=config.drop_last)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(*problems)


def _check_faults(config: RunConfig, attempt: AttemptDir, world_size: int) -> None:
    """Raise ConfigError for a fault of this start that no rank would have: one would take it for survived."""
    for fault in config.faults:
        if fault.attempt in (None, attempt.number) and fault.rank >= world_size:
            raise ConfigError(
                f"faults: there is no rank {fault.rank} among {counted(world_size, 'process')}; count from 0"
            )


def plan_threads(
    config: RunConfig, topology: Topology, nproc: int, environ: Mapping[str, str], loaders: int, *, on_cpu: bool
) -> tuple[int, str]:
    """CPU threads per rank, and where the number comes from."""
    if config.launch.num_threads is not None:
        return config.launch.num_threads, "launch.num_threads"
    own = environ.get("OMP_NUM_THREADS", "")
    if own.isdigit() and int(own) > 0:
        return int(own), "OMP_NUM_THREADS of your environment"
    if config.virtual_shards and on_cpu:  # as many on any number of processes: sums over threads have an order, too
        note = f"{counted(topology.cores, 'core')} / {counted(config.virtual_shards, 'virtual shard')}"
        return max(1, topology.cores // config.virtual_shards), note
    note = f"{counted(topology.cores, 'core')} / {counted(nproc, 'process')}"
    note += f" - {counted(loaders, 'loader worker')}" if loaders else ""
    return max(1, topology.cores // nproc - loaders), note


def num_loaders(config: RunConfig, workers: int) -> int:
    """`workers` where a rank streams. That a built-in set is too large for the device, only the ranks will find out."""
    data = config.data
    may_be_resident = data.name in KNOWN_DATA and not data.augment.changes_single_images
    streams = data.residency == "stream" or (data.residency == "auto" and not may_be_resident)
    return workers if streams else 0


def _command(worker: WorkerPlan, request: Request) -> list[str]:
    module = [request.worker, str(request.attempt.path)]
    if worker.launcher == "direct":
        return backends.direct_command(request.python, module)
    if worker.launcher == "fork":
        return backends.fork_command(request.python, module)
    if worker.launcher == "accelerate":
        config_file = request.attempt.path / "accelerate.yaml"
        return backends.accelerate_command(
            request.python,
            module,
            nproc=worker.local_world_size,
            meeting=request.meeting,
            config_file=config_file,
            threads=worker.threads_per_rank,
        )
    nproc, meeting, run_id = worker.local_world_size, request.meeting, request.run_name
    if request.nodes:
        return backends.torchrun_nodes_command(
            request.python, module, nproc=nproc, meeting=meeting, run_id=run_id, nodes=request.nodes
        )
    return backends.torchrun_command(request.python, module, nproc=nproc, meeting=meeting, run_id=run_id)


def _files(worker: WorkerPlan) -> dict[str, str]:
    if worker.launcher != "accelerate":
        return {}
    return {"accelerate.yaml": backends.accelerate_config(nproc=worker.local_world_size, device=worker.device)}


def _device_line(worker: WorkerPlan, topology: Topology, nnodes: int) -> str:
    nproc = worker.local_world_size
    nodes = f" on each of {counted(nnodes, 'node')}" if nnodes > 1 else ""
    if worker.device == "cuda":
        return f"{counted(nproc, 'process')} on {counted(nproc, 'GPU')}{nodes}, of {topology.num_gpus} visible"
    if worker.device == "mps":
        return "1 process on the Apple GPU (mps)"
    over = " over gloo" if worker.world_size > 1 else ""
    reason = f"no GPU is visible ({topology.gpu_reason})" if topology.gpu_reason else "device=cpu"
    return f"{counted(nproc, 'CPU process')}{nodes}{over}: {reason}"


def _memory_note(worker: WorkerPlan, request: Request) -> list[str]:
    """What is remembered of an earlier attempt, where it changes anything."""
    if worker.mode == "eval" or worker.batches == plan_batches(worker.config, worker.world_size):
        return []
    file = shown(RunDir(request.attempt.path.parent.parent).micro_batch, request.cwd)
    size = counted(worker.max_micro_batch or 0, "sample")
    return [f"micro-batches of at most {size}: more ran out of memory, says {file}; delete it to forget"]


def _changes_note(worker: WorkerPlan) -> list[str]:
    if not worker.eval_changes:
        return []
    return [f"evaluated with other settings than the run's: {'; '.join(worker.eval_changes)}"]


def _warnings(worker: WorkerPlan, topology: Topology) -> list[str]:
    workers = worker.local_world_size * num_loaders(worker.config, worker.num_workers)
    if topology.shm_bytes is not None and topology.shm_bytes < workers * WORKER_SHM_BYTES:
        mib = topology.shm_bytes // 2**20
        return [f"shared memory is {mib} MiB, little for {counted(workers, 'loader worker')} (docker: --shm-size)"]
    return []
