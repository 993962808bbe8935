"""Checks before anything starts: disk, data, host and port. What needs torch, trainer.prepare does."""

import contextlib
import errno
import fcntl
import importlib.util
import os
import resource
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from configs.derive import counted
from configs.errors import ConfigError, EnvironmentProblem
from configs.folders import find_splits
from configs.known_data import HUGGING_FACE, IMAGE_FOLDER, KNOWN_DATA, WEBDATASET
from configs.known_models import NO_WEIGHTS, is_published, timm_name
from configs.schema import RunConfig
from launch.backends import Rendezvous
from launch.plan import LaunchPlan, num_loaders
from launch.processes import dies_with_parent
from launch.signals import signal_words

MIN_FREE_BYTES = 100 * 2**20
"""Two checkpoints of a small network, logs, event files. A checkpoint that does not fit says so itself."""


def check_torch(torch_version: Path | None) -> None:
    if torch_version is None:
        raise EnvironmentProblem(f"torch is not installed for {sys.executable}; run `make setup` or set PYTHON=")


def check_disk(runs: Path) -> None:
    """The runs folder, or what it would be made in, is writable and not nearly full."""
    place = next(path for path in (runs, *runs.parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"cannot write to {place}; choose another --runs-dir")
    free = shutil.disk_usage(place).free
    if free < MIN_FREE_BYTES:
        raise EnvironmentProblem(
            f"{place} has {free / 2**20:.0f} MiB free and a run needs at least {MIN_FREE_BYTES // 2**20} MiB; "
            "free some space or choose another --runs-dir"
        )


def check_open_files(plan: LaunchPlan) -> None:
    """The limit of open files, which the ranks inherit, leaves room for the pipes and batches of loader workers.

    Measured: a rank has about 40 open and 4 for each other rank; a worker needs 5 in it, and 4 for its batches, twice
    while an evaluation goes on.
    """
    workers = num_loaders(plan.config, plan.worker.num_workers)
    needed = 64 + 8 * plan.worker.world_size + 20 * workers
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if workers and limit != resource.RLIM_INFINITY and limit < needed:
        raise EnvironmentProblem(
            f"a process may have {limit} open files and a rank with {counted(workers, 'loader worker')} needs up to "
            f"{needed}; raise it with `ulimit -n {needed}` or use fewer data.num_workers"
        )


def data_missing(config: RunConfig, cwd: Path) -> bool:
    """Whether files that torchvision would read are not there yet, or an index is to be looked at. A data set of the
    user's own is the user's."""
    known = KNOWN_DATA.get(config.data.name)
    if known is None:
        return config.data.name in (WEBDATASET, HUGGING_FACE)
    return not known.is_complete(cwd / config.data.root)


def check_folders(config: RunConfig, cwd: Path) -> None:
    """Raise ConfigError where folders of images or tars are not where, or not as, the settings say."""
    if config.data.name in (IMAGE_FOLDER, WEBDATASET):
        find_splits(config.data, cwd)


def check_model(config: RunConfig, cwd: Path, *, is_new: bool) -> None:
    """Raise ConfigError where weights to begin with are not where the settings say, or timm is not installed; a run
    that `is_new` has no checkpoint to go on from."""
    if timm_name(config.model.name) is not None and importlib.util.find_spec("timm") is None:
        raise ConfigError(f"model.name: {config.model.name} needs timm, which is not installed; `pip install timm`")
    weights = config.model.weights
    given = weights if weights != NO_WEIGHTS and not is_published(weights) else None
    for key, place in (("init_from", config.init_from), ("model.weights", given)):
        if is_new and place is not None and not (cwd / place).exists():
            raise ConfigError(f"{key}: {place} does not exist")


def check_teacher(config: RunConfig, cwd: Path) -> None:
    """Raise ConfigError where the run to learn from is not there."""
    teacher = config.loss.teacher
    if teacher is not None and not (cwd / teacher).is_dir():
        raise ConfigError(
            f"loss.teacher: there is no folder {cwd / teacher}; give that of a finished run, such as runs/NAME"
        )


def prepare_data(plan: LaunchPlan, environ: Mapping[str, str], module: str) -> int:
    """Download and unpack in one helper process, before any rank starts; returns its exit code."""
    command = [plan.argv[0], "-u", "-m", module, str(plan.attempt.plan)]
    code, _ = run_helper(command, plan, environ, capture=False)
    return code


def run_helper(command: list[str], plan: LaunchPlan, environ: Mapping[str, str], *, capture: bool) -> tuple[int, str]:
    """Run a helper with the ranks' environment; a stop signal, or the launcher's end, ends it at once.

    Returns its exit code and, with `capture`, what it printed. Raises EnvironmentProblem if it was killed.
    """
    helper = subprocess.Popen(
        command,
        cwd=plan.cwd,
        env=plan.child_environ(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if capture else None,
        text=True,
        start_new_session=True,
        preexec_fn=dies_with_parent(),
    )
    try:
        text, _ = helper.communicate()
    finally:
        if helper.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(helper.pid, signal.SIGKILL)
            helper.wait()
    if helper.returncode < 0:
        raise EnvironmentProblem(f"the helper `{shlex.join(command[:-1])}` was {signal_words(helper.returncode)}")
    return helper.returncode, text or ""


def check_rendezvous(nodes: Rendezvous) -> None:
    """The host has an address and, on node 0, the port is free: said before anything waits for minutes."""
    host, port = split_endpoint(nodes.endpoint)
    _resolve(host, port)
    if nodes.node_rank == 0:
        _check_port(port)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def local_address(endpoint: str) -> str | None:
    """This machine's address towards the endpoint. torchrun would take its host name, which others may not know."""
    host, port = split_endpoint(endpoint)
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: chooses the route, sends nothing
            return str(probe.getsockname()[0])
    return None


def interface_of(address: str | None) -> str | None:
    """Name of the network interface that has this IPv4 address; None if there is none or it cannot be told."""
    if address is None or sys.platform != "linux":
        return None
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _resolve(host: str, port: int) -> None:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EnvironmentProblem(f"--rdzv-endpoint: host {host!r} has no address here ({error.strerror})") from error


def _check_port(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            owner = _port_owner(port) if error.errno == errno.EADDRINUSE else None
            by = f" by pid {owner}" if owner else ""
            raise EnvironmentProblem(
                f"--rdzv-endpoint: port {port} cannot be opened on this node: {os.strerror(error.errno or 0)}{by}; "
                "choose another port, on every node"
            ) from error


def _port_owner(port: int) -> int | None:
    """Pid of the process that listens there, if /proc lets us see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(table).read_text(encoding="ascii").splitlines()[1:]]
            inodes |= {
                f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
            }
    for link in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        with contextlib.suppress(OSError):
            if str(link.readlink()) in inodes:
                return int(link.parts[2])
    return None
