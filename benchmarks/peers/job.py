"""What all peers' scripts have in common: the arguments, the data, the workers, the answer."""

import argparse
import json
import os

from torchvision import datasets, transforms

BATCH_SIZE = 64
LEARNING_RATE = 0.003


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, help="of an epoch, at most; where the script knows it")
    parser.add_argument("--output", default="benchmarks/out", help="folder for what the peer writes by itself")
    return parser.parse_args()


def mnist(train):
    """The tutorial's data set, as in benchmarks/tutorial_script.py."""
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    return datasets.MNIST("data", train=train, transform=transform)


def workers(default):
    """A peer's own number of loader processes, but no more than cores: torch warns that more slow it down."""
    return min(default, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())


def answer(top1):
    """The last line: a fraction of the test split."""
    print(json.dumps({"top1": float(top1)}))
