"""The command that starts the ranks: one function a backend. Pure: text in, text out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

JOIN_TIMEOUT_S = 300
"""How long a node waits for the others."""

# Without this a user's own file in ~/.cache/huggingface/accelerate would decide.
ACCELERATE_CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: {distributed_type}
use_cpu: {use_cpu}
num_machines: 1
machine_rank: 0
num_processes: {num_processes}
gpu_ids: all
main_process_port: 0
mixed_precision: 'no'
enable_cpu_affinity: false
debug: false
"""

Launcher = Literal["torchrun", "accelerate", "fork"]
"""What may be asked for."""
FORK_ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Whether there is a GPU is asked without the driver, which does not survive a fork."""


@dataclass(frozen=True)
class Rendezvous:
    """How several nodes meet."""

    nnodes: int
    node_rank: int
    endpoint: str
    local_addr: str | None


def direct_command(python: str, worker: Sequence[str]) -> list[str]:
    """One process, without torchrun."""
    return [python, "-u", "-m", *worker]


def fork_command(python: str, worker: Sequence[str]) -> list[str]:
    """One node: a process that imports torch once and forks the ranks."""
    module, *arguments = worker
    return [python, "-u", "-m", f"{module}.fork", *arguments]


def torchrun_command(python: str, worker: Sequence[str], *, nproc: int, meeting: Path, run_id: str) -> list[str]:
    """One node: the ranks meet through a fresh file, so no port is chosen and nothing listens on the network."""
    options = ["--nnodes", "1", "--nproc-per-node", str(nproc), "--rdzv-conf", "store_type=file"]
    # Without a local address torchrun asks the DNS for this machine's name, which can take seconds.
    options += ["--rdzv-endpoint", str(meeting / "agent"), "--local-addr", "127.0.0.1"]
    return _torchrun(python, worker, options, meeting, run_id)


def torchrun_nodes_command(
    python: str, worker: Sequence[str], *, nproc: int, meeting: Path, run_id: str, nodes: Rendezvous
) -> list[str]:
    """Several nodes, through torchrun's c10d rendezvous; node 0 hosts its store, whatever HOST resolves to there."""
    is_host = "true" if nodes.node_rank == 0 else "false"
    conf = f"is_host={is_host},join_timeout={JOIN_TIMEOUT_S},read_timeout={JOIN_TIMEOUT_S}"
    options = ["--nnodes", str(nodes.nnodes), "--nproc-per-node", str(nproc), "--rdzv-conf", conf]
    options += ["--rdzv-endpoint", nodes.endpoint]
    options += ["--local-addr", nodes.local_addr] if nodes.local_addr else []
    return _torchrun(python, worker, options, meeting, run_id)


def _torchrun(python: str, worker: Sequence[str], options: list[str], meeting: Path, run_id: str) -> list[str]:
    common = ["--rdzv-backend", "c10d", "--rdzv-id", run_id, "--max-restarts", "0", "--monitor-interval", "0.1"]
    # Its log folder, which stays empty, would else be left in /tmp.
    common += ["--log-dir", str(meeting)]
    return [python, "-m", "torch.distributed.run", *options, *common, "-m", *worker]


def accelerate_command(
    python: str, worker: Sequence[str], *, nproc: int, meeting: Path, config_file: Path, threads: int
) -> list[str]:
    """`accelerate launch` with a configuration file of our own. Several processes meet as torchrun's do: in a file."""
    command = [python, "-m", "accelerate.commands.launch", "--config_file", str(config_file)]
    command += ["--num_processes", str(nproc), "--num_machines", "1", "--machine_rank", "0", "--main_process_port", "0"]
    command += ["--num_cpu_threads_per_process", str(threads), "--max_restarts", "0", "--monitor_interval", "0.1"]
    command += ["--rdzv_backend", "c10d", "--rdzv_conf", "store_type=file"] if nproc > 1 else []
    return [*command, "--log_dir", str(meeting), "--module", *worker]


def accelerate_environment(*, meeting: Path, run_id: str) -> dict[str, str]:
    """torchrun's options that `accelerate launch` has not: it reads them as torchrun does, from the environment."""
    endpoint = str(meeting / "agent")
    return {"PET_RDZV_ENDPOINT": endpoint, "PET_RDZV_ID": run_id, "PET_LOCAL_ADDR": "127.0.0.1"}


def accelerate_config(*, nproc: int, device: str) -> str:
    """Text of that file."""
    distributed_type = "MULTI_GPU" if nproc > 1 else "'NO'"
    return ACCELERATE_CONFIG.format(
        distributed_type=distributed_type, use_cpu=str(device == "cpu").lower(), num_processes=nproc
    )
