"""Which part of an image is seen, and that it has the pixels that torchvision's transforms give."""

import io
import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, JpegImagePlugin
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as TF

from configs.data_section import DataConfig
from tests import splitmix
from tests.folders import noisy
from trainer.data import jpeg
from trainer.data.crops import centre_box, centre_view, random_box, random_view
from trainer.data.datasets import load_data
from trainer.data.decode import Box, read_pixels
from trainer.data.order import key_of, uniforms

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def smooth(width: int, height: int) -> Image.Image:
    """Waves of some 40 pixels in each colour."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [128 + 100 * np.sin(x / 7 + phase) * np.cos(y / 9 - phase) for phase in range(3)]
    return Image.fromarray(np.stack(waves, axis=2).astype(np.uint8))


def stored(image: Image.Image, kind: str = "PNG", **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


def as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).int()


def test_uniform_numbers_are_the_high_bits_of_the_generators_outputs() -> None:
    expected = [output / 2**64 for output in splitmix.first_outputs(99, 5)]
    assert list(itertools.islice(uniforms(99), 5)) == pytest.approx(expected, abs=2**-52)


def boxes(count: int, width: int, height: int, scale: Any = SCALE, ratio: Any = RATIO) -> list[Box]:
    return [random_box(uniforms(key_of(1, index)), width, height, scale, ratio) for index in range(count)]


def test_the_first_draws_make_the_crop() -> None:
    area, aspect, top, left = (output / 2**64 for output in splitmix.first_outputs(splitmix.key(1, 0), 4))
    share = 0.08 + 0.92 * area
    ratio = math.exp(math.log(3 / 4) + aspect * (math.log(4 / 3) - math.log(3 / 4)))
    width, height = round(math.sqrt(500 * 400 * share * ratio)), round(math.sqrt(500 * 400 * share / ratio))
    assert width <= 500 and height <= 400, "a key whose first try fits"  # noqa: PT018
    x, y = math.floor(left * (501 - width)), math.floor(top * (401 - height))
    assert boxes(1, 500, 400)[0] == (x, y, x + width, y + height)


def test_crops_are_spread_as_they_should_be() -> None:
    found = boxes(2000, 400, 400)
    shares = [(right - left) * (bottom - top) / 400**2 for left, top, right, bottom in found]
    ratios = [(right - left) / (bottom - top) for left, top, right, bottom in found]
    assert min(shares) > 0.07
    assert max(shares) <= 1.0
    assert 0.73 < min(ratios) < 0.77
    assert 1.31 < max(ratios) < 1.36
    # torchvision's own draws, of another generator: means of 2000 agree within some standard errors.
    torch.manual_seed(0)
    image = torch.empty(3, 400, 400)
    theirs = [RandomResizedCrop.get_params(image, list(SCALE), list(RATIO)) for _ in range(2000)]
    for mine, other in (
        (shares, [height * width / 400**2 for _, _, height, width in theirs]),
        (ratios, [width / height for _, _, height, width in theirs]),
        ([box[0] for box in found], [left for _, left, _, _ in theirs]),
        ([box[1] for box in found], [top for top, _, _, _ in theirs]),
    ):
        error = statistics.stdev(mine) * math.sqrt(2 / 2000)
        assert abs(statistics.mean(mine) - statistics.mean(other)) < 4 * error


@pytest.mark.parametrize("size", [(1, 1), (1, 90), (90, 1), (400, 10), (10, 400), (1, 20_000)], ids=str)
def test_what_no_try_fits_is_torchvisions_middle(size: tuple[int, int]) -> None:
    width, height = size
    # No crop of this area fits, so all ten tries fail.
    scale = (1.0, 1.0) if max(size) > 1 else (3.0, 3.0)
    (box,) = boxes(1, width, height, scale)
    top, left, box_height, box_width = RandomResizedCrop.get_params(torch.empty(3, height, width), scale, RATIO)  # type: ignore[arg-type]
    assert box == (left, top, left + box_width, top + box_height)


@pytest.mark.parametrize("size", [(60, 40), (40, 60), (50, 50), (33, 121), (500, 375)], ids=str)
@pytest.mark.parametrize("target", [(24, 28), (32, 32), (16, 200)], ids=str)
def test_the_centre_is_torchvisions(size: tuple[int, int], target: tuple[int, int]) -> None:
    image, (side, resize) = smooth(*size), target
    expected = TF.center_crop(TF.resize(image, resize), [side, side])  # type: ignore[arg-type]
    found = read_pixels(stored(image), 3, centre_view(side, resize))
    assert found.shape == (3, side, side)
    # One pass where torchvision takes two: filters whose edge falls between two pixels are rounded differently.
    difference = (found.int() - as_tensor(expected)).abs()
    assert difference.max() <= 2
    assert difference.float().mean() < 0.2


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_random_crop_has_torchvisions_pixels(interpolation: str) -> None:
    image, mode = smooth(200, 150), TF.InterpolationMode(interpolation)
    for index in range(20):
        key = key_of(1, index)
        left, top, right, bottom = map(int, random_box(uniforms(key), 200, 150, SCALE, RATIO))
        expected = TF.resized_crop(image, top, left, bottom - top, right - left, [32, 32], mode)  # type: ignore[arg-type]
        found = read_pixels(stored(image), 3, random_view(key, 32, SCALE, RATIO, interpolation))
        difference = (found.int() - as_tensor(expected)).abs()
        assert difference.max() <= 1
        assert difference.float().mean() < 0.1


@pytest.mark.parametrize("size", [(1, 1), (1, 20_000), (20_000, 1), (3, 2)], ids=str)
def test_any_shape_becomes_the_square(size: tuple[int, int]) -> None:
    file = stored(Image.new("RGB", size, (9, 8, 7)))
    for view in (centre_view(32, 36), random_view(5, 32, SCALE, RATIO)):
        file.seek(0)
        found = read_pixels(file, 3, view)
        assert found.shape == (3, 32, 32)
        assert found[:, 0, 0].tolist() == [9, 8, 7]


def test_the_box_never_leaves_the_image() -> None:
    for width, height, side in itertools.product((1, 3, 7, 97, 640), (1, 5, 89, 481), (1, 7, 224)):
        for resize in (side, round(side * 8 / 7), 3 * side):
            left, top, right, bottom = centre_box(width, height, side, resize)
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height


def test_a_turned_image_is_cropped_upright() -> None:
    upright = smooth(64, 48)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    turned = stored(upright.transpose(Image.Transpose.ROTATE_90), exif=exif)
    for view in (centre_view(16, 20), random_view(3, 16, SCALE, RATIO)):
        turned.seek(0)
        assert torch.equal(read_pixels(turned, 3, view), read_pixels(stored(upright), 3, view))


@pytest.mark.parametrize("turn", [1, 6])
@pytest.mark.parametrize(
    ("side", "factor"), [(8, 8), (16, 8), (24, 4), (32, 4), (50, 2), (64, 2), (65, 1), (128, 1), (300, 1)]
)
def test_large_jpegs_are_decoded_smaller_where_twice_the_pixels_remain(
    side: int, factor: int, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Pillow; test_jpeg.py holds the other decoder to its pixels."""
    monkeypatch.setattr(jpeg, "library", lambda: None)
    asked = []
    draft = JpegImagePlugin.JpegImageFile.draft

    def noted(self: Any, mode: Any, size: Any) -> Any:
        answer = draft(self, mode, size)
        asked.append(self.size)
        return answer

    exif = Image.Exif()
    exif[0x0112] = turn
    image = smooth(403, 256)
    stored_image = image.transpose(Image.Transpose.ROTATE_90) if turn == 6 else image
    file = stored(stored_image, "JPEG", quality=95, exif=exif)
    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", noted)
    found = read_pixels(file, 3, centre_view(side, side))
    size = (-(-403 // factor), -(-256 // factor))
    assert asked == ([] if factor == 1 else [size if turn == 1 else size[::-1]])
    expected = read_pixels(stored(image), 3, centre_view(side, side))
    assert (found.int() - expected.int()).abs().float().mean() < 3


def config(root: Path, **more: Any) -> DataConfig:
    return DataConfig.model_validate({"name": "imagefolder", "root": str(root), "image_size": 8} | more)


def test_each_epoch_has_its_crops_and_evaluation_the_centre(tmp_path: Path) -> None:
    root = noisy(tmp_path, train__a=3, train__b=3, val__a=2)
    data = load_data(config(root))
    train: Any = data.train
    crops = [train.sample(seed, epoch, index)[0] for seed in (0, 1) for epoch in (0, 1) for index in (0, 1)]
    assert all(crop.shape == (3, 8, 8) for crop in crops)
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(crops, 2))
    assert torch.equal(train.sample(1, 1, 1)[0], crops[-1])
    expected = read_pixels(train.files.path(4), 3, random_view(splitmix.key(3, 2, 5, 4), 8, SCALE, RATIO))
    assert torch.equal(train.sample(3, 2, 4)[0], expected)
    evaluation: Any = data.evaluation
    assert torch.equal(evaluation.sample(0, 0, 1)[0], evaluation.sample(5, 7, 1)[0])
    # 8 / 7 of 8 pixels, rounded.
    assert torch.equal(evaluation[1][0], read_pixels(evaluation.files.path(1), 3, centre_view(8, 9)))
    larger: Any = load_data(config(root, resize_size=12)).evaluation
    assert torch.equal(larger[1][0], read_pixels(larger.files.path(1), 3, centre_view(8, 12)))


def test_without_random_crops_training_sees_the_centre_too(tmp_path: Path) -> None:
    root = noisy(tmp_path, train__a=1, train__b=1, val__a=1)
    train: Any = load_data(config(root, augment={"crop_scale": None})).train
    assert torch.equal(train.sample(0, 0, 0)[0], read_pixels(train.files.path(0), 3, centre_view(8, 9)))


def test_scale_and_ratio_are_those_of_the_settings(tmp_path: Path) -> None:
    root = noisy(tmp_path, train__a=1, train__b=1, val__a=1)
    train: Any = load_data(config(root, augment={"crop_scale": [0.2, 0.3], "crop_ratio": [2.0, 3.0]})).train
    view = random_view(splitmix.key(0, 0, 5, 0), 8, (0.2, 0.3), (2.0, 3.0))
    assert torch.equal(train.sample(0, 0, 0)[0], read_pixels(train.files.path(0), 3, view))


def test_the_interpolation_is_the_settings_or_drawn_by_the_sample(tmp_path: Path) -> None:
    root = noisy(tmp_path / "images", train__a=8, train__b=1, val__a=2)

    def splits(**more: Any) -> tuple[Any, Any]:
        data = load_data(config(root, **more))
        return data.train, data.evaluation

    linear, cubic, either = (splits(interpolation=name) for name in ("bilinear", "bicubic", "random"))
    for index in range(8):
        path, key = linear[0].files.path(index), splitmix.key(3, 2, 5, index)
        crops = [read_pixels(path, 3, random_view(key, 8, SCALE, RATIO, name)) for name in ("bilinear", "bicubic")]
        assert not torch.equal(*crops)
        assert torch.equal(linear[0].sample(3, 2, index)[0], crops[0])
        assert torch.equal(cubic[0].sample(3, 2, index)[0], crops[1])
        is_linear = splitmix.key(3, 2, 12, index) % 2
        assert torch.equal(either[0].sample(3, 2, index)[0], crops[0 if is_linear else 1])
    assert len({splitmix.key(3, 2, 12, index) % 2 for index in range(8)}) == 2
    assert torch.equal(either[1].sample(3, 0, 1)[0], cubic[1].sample(3, 0, 1)[0])
    assert not torch.equal(linear[1].sample(3, 0, 1)[0], cubic[1].sample(3, 0, 1)[0])
