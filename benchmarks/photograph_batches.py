"""Lockstep's side of benchmarks/photographs.py: the batches of a real job, as the step gets them."""

import argparse
import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.jobs import STEADY, batches_of, build_job
from benchmarks.turns import AHEAD, ALONE, BATCH, EPOCH, answer_in_turn, turn
from configs.loader import load_config
from configs.schema import RunConfig
from trainer.data import jpeg, workers
from trainer.job import Job


def batches(job: Job) -> Iterator[int]:
    """Make each ready for the network; yields the number of its images."""
    for batch, [(images, _)] in batches_of(job):
        yield len(job.preprocess.for_training(images, batch.epoch, batch.pieces[0]))


def photographs_config(root: str, num_workers: int) -> RunConfig:
    data = ["image_size=224", "augment.crop_scale=[0.08,1.0]", f"root={root}", f"num_workers={num_workers}"]
    settings = [f"global_batch_size={BATCH}", "mixed_precision=no", *(f"data.{setting}" for setting in data), *STEADY]
    return load_config(ROOT / "configs/imagefolder.yaml", settings).config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--num-workers", type=int, required=True)
    parser.add_argument("--without-simplejpeg", action="store_true")
    options = parser.parse_args()
    if options.without_simplejpeg:
        jpeg.library = lambda: None
    config = photographs_config(options.root, options.num_workers)
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            job = build_job(config, Path(folder))
        ready = batches(job)
        if options.num_workers:
            answer_in_turn(lambda: turn(ready, EPOCH - AHEAD, AHEAD))
            workers.tidy_up()
        else:
            answer_in_turn(lambda: turn(ready, ALONE))


if __name__ == "__main__":
    main()
