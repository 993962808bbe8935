"""Photographs through timm's loader with two workers and its prefetcher, which normalises: flips and random crops, all
bilinear; no jitter, no policy, no erasing."""

import argparse

import torch
from timm.data import create_dataset, create_loader

from benchmarks.turns import AHEAD, BATCH, EPOCH, answer_in_turn, turn


def ready(root):
    dataset = create_dataset("", root=root, split="train", is_training=True)
    plain = {"color_jitter": None, "auto_augment": None, "re_prob": 0.0, "hflip": 0.5, "interpolation": "bilinear"}
    loading = {"batch_size": BATCH, "num_workers": 2, "device": torch.device("cpu"), "persistent_workers": True}
    loader = create_loader(dataset, input_size=(3, 224, 224), is_training=True, **plain, **loading)
    assert len(loader) == EPOCH
    while True:
        for images, _ in loader:
            yield len(images)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    batches = ready(parser.parse_args().root)
    answer_in_turn(lambda: turn(batches, EPOCH - AHEAD, AHEAD))


if __name__ == "__main__":
    main()
