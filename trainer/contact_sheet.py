"""A picture of samples as training sees them: after decoding, cropping and augmentation."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from configs.schema import RunConfig
from trainer.data.augment import Preprocess
from trainer.data.encoded import Splits
from trainer.data.images import TRAINING, ImageSplit
from trainer.data.mixing import Mixing
from trainer.data.policies import Policy
from trainer.data.sizes import size_at
from trainer.data.stream import KeyedSamples

_COLUMNS, _ROWS = 8, 4
_CAPTION, _GAP = 14, 4
_MAX_SIDE = 224


def draw_samples(splits: Splits, config: RunConfig, indices: Sequence[int], path: Path) -> None:
    """Write a PNG with samples of epoch 0, spread over `indices` of the training split, each with its class. Pairs of
    those that are shown are mixed, where pairs are."""
    count = min(len(indices), _COLUMNS * _ROWS)
    shown = [indices[number * len(indices) // count] for number in range(count)]
    images, captions = _seen(splits, config, shown)
    cells = list(zip(map(_drawn, images), captions, strict=True))
    side = max(max(image.size) for image, _ in cells)
    step, line = side + _GAP, side + _CAPTION + _GAP
    sheet = Image.new("RGB", (_GAP + _COLUMNS * step, _GAP + -(-len(cells) // _COLUMNS) * line), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (image, name) in enumerate(cells):
        x, y = _GAP + number % _COLUMNS * step, _GAP + number // _COLUMNS * line
        sheet.paste(image, (x, y))
        # Pillow's own font has Latin letters only.
        pen.text((x, y + side), name.encode("ascii", "backslashreplace").decode()[: side // 6], fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def _seen(splits: Splits, config: RunConfig, indices: Sequence[int]) -> tuple[list[Tensor], list[str]]:
    """What the network is given, floating (C, H, W) with normalisation undone, and the classes of each."""
    data, cpu = config.data, torch.device("cpu")
    samples = KeyedSamples(
        ImageSplit(splits.train, TRAINING, data),
        config.seed,
        len(splits.classes),
        Policy(data.augment) if data.augment.changes_single_images else None,
    )
    side = size_at(data, config.seed, 0, 0)
    preprocess = Preprocess(data.augment, config.seed, data.mean, data.std, torch.float32, cpu)
    images = [
        preprocess.for_training(samples.sample(0, index, side)[0].unsqueeze(0), 0, torch.tensor([index]))[0]
        for index in indices
    ]
    labels = torch.from_numpy(splits.train.labels[list(indices)])
    captions = [splits.classes[label] for label in labels]
    if data.augment.mixes and len({image.shape for image in images}) == 1:
        mixing = Mixing(data.augment, config.seed, len(splits.classes), cpu)
        mixed, targets = mixing(torch.stack(images), labels, 0, torch.tensor(indices))
        images, captions = list(mixed), [_shares(splits.classes, target) for target in targets]
    if preprocess.mean is not None and preprocess.std is not None:
        images = [image * preprocess.std[0] + preprocess.mean[0] for image in images]
    return images, captions


def _shares(classes: Sequence[str], target: Tensor) -> str:
    """`cat`, or `70% cat 30% dog`."""
    shares, labels = target.sort(descending=True, stable=True)
    if shares[0] == 1:
        return classes[int(labels[0])]
    return " ".join(f"{100 * float(shares[i]):.0f}% {classes[int(labels[i])]}" for i in range(2))


def _drawn(image: Tensor) -> Image.Image:
    array = (image * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).squeeze(2).numpy()
    drawn = Image.fromarray(array).convert("RGB")
    drawn.thumbnail((_MAX_SIDE, _MAX_SIDE))
    return drawn
