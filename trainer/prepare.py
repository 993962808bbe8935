"""Work that must be done once, before any rank starts: `python -m trainer.prepare PLAN` unpacks or downloads the data
set and published weights;
`python -m trainer.prepare --probe PLAN` takes a step and prints what only torch can know, as one JSON object;
`--probe-batch` the largest micro-batch that fits in memory, `--probe-compile` whether torch.compile pays."""

import gzip
import hashlib
import json
import os
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.contract import WorkerPlan
from configs.data_section import DataConfig
from configs.errors import EnvironmentProblem
from configs.folders import find_splits
from configs.known_data import HUGGING_FACE, KNOWN_DATA, WEBDATASET, KnownData
from configs.known_models import is_published
from configs.run_dir import RunDir
from trainer.aside import aside, locked
from trainer.exits import leave, told
from trainer.prepare_tables import prepare_tables

EMBEDDED_MNIST = Path(__file__).resolve().parent.parent / "data" / "mnist"
# The well-known MD5 sums of the uncompressed files, as in data/mnist/README.md.
MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def prepare_data(config: DataConfig) -> None:
    """Have the data set of `config` complete under data.root,
    or raise EnvironmentProblem. Safe with any number of callers."""
    known, root = KNOWN_DATA.get(config.name), Path(config.root)
    if config.name == WEBDATASET:
        index_tars(config)
    if known is None and config.name != HUGGING_FACE:
        return
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / ".lock"):
        if known is None:
            prepare_tables(config)
            return
        if known.is_complete(root):
            return
        with aside(root) as folder:
            if config.name == "mnist" and config.mirror is None:
                unpack_mnist(folder / known.folder)
            else:
                download(config, known, folder)
            for path in (folder / known.folder).iterdir():
                _sync(path)
            final = root / known.folder
            final.parent.mkdir(exist_ok=True)
            if final.exists():  # incomplete; it goes with the folder aside
                final.rename(folder / "incomplete")
            (folder / known.folder).rename(final)
            _sync(final.parent)


def index_tars(config: DataConfig) -> None:
    """Read the tars' headers once, where the index can be written beside them."""
    from trainer.data.tar_index import index_of

    for folder in find_splits(config):
        if folder is not None:
            index_of(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def unpack_mnist(folder: Path) -> None:
    """Unpack the embedded files to where torchvision.datasets.MNIST reads them.
    Raises EnvironmentProblem if one is not MNIST's."""
    folder.mkdir(parents=True)
    for name, md5 in MNIST_MD5.items():
        packed = EMBEDDED_MNIST / f"{name}.gz"
        try:
            content = gzip.decompress(packed.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            raise EnvironmentProblem(
                f"cannot unpack {packed}: {error}; restore it with `git checkout -- {packed}`"
            ) from error
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != md5:
            raise EnvironmentProblem(
                f"{packed} is damaged: MD5 {found}, expected {md5}; restore it with `git checkout -- {packed}`"
            )
        (folder / name).write_bytes(content)


def download(config: DataConfig, known: KnownData, aside: Path) -> None:
    """Fetch through torchvision, which checks the hashes, into `aside`."""
    from torchvision import datasets

    source = getattr(datasets, known.torchvision_name)
    if config.mirror is not None:
        _use_mirror(source, config.mirror.rstrip("/"))
    # Whatever is in the archive, it stays in its folder: no `..`, no absolute name, no link that leads out.
    if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on; before that, the archive's hash stands guard alone
        tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)
    print(f"downloading {config.name} to {Path(config.root).resolve()}", flush=True)
    try:
        source(str(aside), train=True, download=True)
    except Exception as error:
        place = config.mirror or "its own site"
        raise EnvironmentProblem(
            f"{config.name} is not in {Path(config.root).resolve() / known.folder} and could not be downloaded "
            f"from {place}: {error}; put torchvision's files there, or set data.mirror"
        ) from error


def _use_mirror(source: Any, mirror: str) -> None:
    """Have a torchvision data set fetch the same file names from `mirror`; their hashes are checked all the same."""
    if hasattr(source, "mirrors"):
        source.mirrors = [mirror + "/"]
    else:
        source.url = f"{mirror}/{source.filename}"


def probe(plan: WorkerPlan) -> dict[str, Any]:
    """Parameters, checkpoint bytes, one step's milliseconds, its FLOPs and this process's peak memory in bytes, in one
    process; the milliseconds of a step with virtual shards and without, where the run has them."""
    from trainer.probe import measure

    return measure(plan) | ({"compile": probe_compile(plan)} if plan.config.compile == "auto" else {})


def probe_batch(plan: WorkerPlan) -> dict[str, int | bool]:
    """The largest micro-batch that fits in memory."""
    from trainer.probe_batch import largest_micro_batch

    return largest_micro_batch(plan)


def probe_compile(plan: WorkerPlan) -> dict[str, Any]:
    """Whether torch.compile pays, and why."""
    from trainer.compiling import measure_compile

    return measure_compile(plan)


def _has_checkpoints(plan: Path) -> bool:
    """Whether the run that the plan lies in (`attempts/K/plan.json`) goes on from a checkpoint, with its weights."""
    return any(RunDir(plan.resolve().parent.parent.parent).checkpoints.glob("step_*"))


def main(arguments: list[str]) -> int:
    probes: dict[str, Callable[[WorkerPlan], dict[str, Any]]] = {
        "--probe": probe,
        "--probe-batch": probe_batch,
        "--probe-compile": probe_compile,
    }
    plan = WorkerPlan.load(Path(arguments[-1]))

    def body() -> int:
        prepare_data(plan.config.data)
        if is_published(plan.config.model.weights) and not _has_checkpoints(Path(arguments[-1])):
            from trainer.published import prepare_weights  # needs torch

            prepare_weights(plan.config.model)
        if arguments[0] in probes:
            print(json.dumps(probes[arguments[0]](plan)))
        return 0

    return told(body)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
