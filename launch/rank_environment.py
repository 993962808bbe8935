"""The environment of the ranks: what a launch sets, and which variables of other programs it takes out."""

import math
import os
import re

from configs.contract import WorkerPlan
from launch import backends
from launch.request import Request
from launch.topology import Topology

# Whatever set these (a scheduler, an outer torchrun, an Accelerate config), it was not for these ranks. PET_* are
# torchrun's own options as variables; Accelerate takes a rank from the MPI ones.
STRAY = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_(RANK|WORLD_SIZE|NAME)|NODE_RANK"
    r"|MASTER_ADDR|MASTER_PORT|PYTHON_EXEC|(ACCELERATE|TORCHELASTIC|TORCH_ELASTIC|PET|FSDP|MEGATRON_LM|DEEPSPEED"
    r"|PARALLELISM_CONFIG|PMI|OMPI_COMM_WORLD|MV2_COMM_WORLD|MPI)_.*"
)

NCCL_PIPES = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""A rank whose pipe is written to has NCCL's flight recorder dump; the value is what comes before `R.pipe`."""

# glibc gives freed memory back to the system, which zeroes each page anew at the next step: up to a quarter of a step's
# time on a CPU (docs/decisions/0013-keep-freed-memory.md). Bytes; other C libraries do not look at these.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def rank_environment(worker: WorkerPlan, topology: Topology, request: Request) -> dict[str, str]:
    """Variables to set for every process below the launcher."""
    paths = [str(request.root), str(request.cwd), *request.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        "OMP_NUM_THREADS": str(worker.threads_per_rank),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
        # The working folder is the user's; a folder named trainer/ there must not hide ours.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
    environment |= {name: value for name, value in KEEP_MEMORY.items() if name not in request.environ}
    if worker.launcher == "fork":
        environment |= backends.FORK_ENVIRONMENT
    if worker.launcher in ("torchrun", "accelerate"):
        # A new group must not read the addresses of the one before it.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # What torchrun gives the other ranks once one has ended. torch before 2.12 takes 30 s, and knows no option.
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(worker.config.launch.grace_s))
    if worker.launcher == "accelerate" and worker.world_size > 1:
        environment |= backends.accelerate_environment(meeting=request.meeting, run_id=request.run_name)
    if worker.world_size > 1 and topology.system == "Linux":
        interface = "lo" if request.nodes is None else request.environ.get("GLOO_SOCKET_IFNAME") or request.interface
        environment |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    if worker.device == "cuda" and worker.world_size > 1:
        environment |= {name: v for name, v in _flight_recorder(request).items() if name not in request.environ}
    if worker.device == "cuda" and worker.config.virtual_shards:
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS may sum in another order each time
    if worker.device == "cuda" and request.nodes is None:
        # It opens a port to get to know its ranks, by default to all.
        environment["NCCL_SOCKET_IFNAME"] = request.environ.get("NCCL_SOCKET_IFNAME") or "lo"
    if worker.device == "cpu" and topology.num_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _flight_recorder(request: Request) -> dict[str, str]:
    """Have NCCL note its last collectives, and dump them into the attempt's folder when one does not end."""
    dumps = str(request.attempt.nccl)
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": dumps,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": dumps,  # its name in older versions
        NCCL_PIPES: str(request.meeting / "nccl-"),
    }
