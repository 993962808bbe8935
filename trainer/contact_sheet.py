"""A picture of samples as training sees them: after decoding, cropping and augmentation."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from configs.schema import RunConfig
from trainer.data.augment import Preprocess
from trainer.data.folder import Splits
from trainer.data.images import TRAINING, ImageSplit
from trainer.data.order import key_of
from trainer.data.policies import POLICY, Policy

_COLUMNS, _ROWS = 8, 4
_CAPTION, _GAP = 14, 4
_MAX_SIDE = 224


def draw_samples(splits: Splits, config: RunConfig, indices: Sequence[int], path: Path) -> None:
    """Write a PNG with samples of epoch 0, spread over `indices` of the training split, each with its class."""
    count = min(len(indices), _COLUMNS * _ROWS)
    shown = [indices[number * len(indices) // count] for number in range(count)]
    split = ImageSplit(splits.train, TRAINING, config.data)
    cells = [(_seen(split, config, index), splits.classes[splits.train.labels[index]]) for index in shown]
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


def _seen(split: ImageSplit, config: RunConfig, index: int) -> Image.Image:
    """What the network is given, with normalisation undone."""
    pixels, _ = split.sample(config.seed, 0, index)
    data, cpu = config.data, torch.device("cpu")
    if data.augment.changes_single_images:
        pixels = Policy(data.augment, data.mean)(pixels, key_of(config.seed, 0, POLICY, index))
    preprocess = Preprocess(data.augment, config.seed, data.mean, data.std, torch.float32, cpu)
    seen = preprocess.for_training(pixels.unsqueeze(0), 0, torch.tensor([index]))
    if preprocess.mean is not None and preprocess.std is not None:
        seen = seen * preprocess.std + preprocess.mean
    array = (seen[0] * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).squeeze(2).numpy()
    image = Image.fromarray(array).convert("RGB")
    image.thumbnail((_MAX_SIDE, _MAX_SIDE))
    return image
