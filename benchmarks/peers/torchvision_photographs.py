"""Photographs as torchvision's reference script reads them, by Pillow, in this process: 64 samples and their batch."""

import argparse

import torch
from torch.utils.data import RandomSampler, default_collate
from torchvision import datasets, transforms

from benchmarks.turns import ALONE, BATCH, answer_in_turn, turn

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def ready(root):
    """presets.ClassificationPresetTrain with its defaults: flips, no policy, no erasing."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224, antialias=True),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float),
            transforms.Normalize(MEAN, STD),
        ]
    )
    dataset = datasets.ImageFolder(f"{root}/train", transform)
    while True:
        for indices in torch.tensor(list(RandomSampler(dataset))).split(BATCH):
            images, _ = default_collate([dataset[index] for index in indices.tolist()])
            yield len(images)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    batches = ready(parser.parse_args().root)
    answer_in_turn(lambda: turn(batches, ALONE))


if __name__ == "__main__":
    main()
