from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

from configs.augment_section import AugmentConfig
from configs.errors import ConfigError
from tests import splitmix
from trainer.data.augment import Preprocess, cutout_mask, shift, shift_reflected

CPU = torch.device("cpu")


def preprocess(dtype: torch.dtype = torch.float32, **augment: Any) -> Preprocess:
    return Preprocess(AugmentConfig(**augment), 5, (0.5,), (0.25,), dtype, CPU)


def random_images(count: int, channels: int = 1, height: int = 6, width: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def drawn(kind: int, epoch: int, index: int, bound: int, seed: int = 5) -> int:
    """Number `index` of the stream (seed, epoch, kind), from the reference: its 31 highest bits, modulo `bound`."""
    return (splitmix.first_outputs(splitmix.key(seed, epoch, kind), index + 1)[index] >> 33) % bound


def moved(image: np.ndarray, down: int, right: int) -> np.ndarray:
    result = np.zeros_like(image)
    channels, height, width = image.shape
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                if 0 <= y - down < height and 0 <= x - right < width:
                    result[c, y, x] = image[c, y - down, x - right]
    return result


@pytest.mark.parametrize(("channels", "reach"), [(1, 2), (3, 1), (1, 7)])
def test_shift_agrees_with_a_loop_over_pixels(channels: int, reach: int) -> None:
    # dy and dx are where the window starts in the padded image, so the picture moves the other way.
    images = random_images(2 * reach + 1, channels)
    dy = torch.arange(2 * reach + 1)
    dx = (3 * dy) % (2 * reach + 1)
    found = shift(images, dy, dx, reach).numpy()
    for i, image in enumerate(images.numpy()):
        np.testing.assert_array_equal(found[i], moved(image, reach - int(dy[i]), reach - int(dx[i])))


@pytest.mark.parametrize("side", [1, 2, 3, 4, 20])
def test_cutout_agrees_with_a_loop_over_pixels(side: int) -> None:
    images = random_images(5)
    y, x = torch.tensor([0, 5, 2, 3, 0]), torch.tensor([0, 8, 4, 0, 8])
    mask = cutout_mask(images, y, x, side)
    assert mask.shape == (5, 1, 6, 9)
    for i in range(5):
        for row in range(6):
            for column in range(9):
                inside = 0 <= row - (int(y[i]) - side // 2) < side and 0 <= column - (int(x[i]) - side // 2) < side
                assert bool(mask[i, 0, row, column]) == (not inside)


def test_normalise_is_bit_equal_with_torchvision_on_pil_images() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    theirs = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    ours = Preprocess(AugmentConfig(), 0, (0.5,), (0.5,), torch.float32, CPU).normalise(images)
    assert torch.equal(ours[0], theirs(Image.fromarray(images[0, 0].numpy())))


def test_normalise_is_bit_equal_with_torchvision_on_three_channels() -> None:
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    images = random_images(1, 3, 16, 16)
    theirs = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    ours = Preprocess(AugmentConfig(), 0, mean, std, torch.float32, CPU).normalise(images)
    assert torch.equal(ours[0], theirs(Image.fromarray(images[0].permute(1, 2, 0).numpy())))


def test_normalise_without_mean_gives_fractions() -> None:
    ours = Preprocess(AugmentConfig(), 0, None, None, torch.float32, CPU).normalise(
        torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8)
    )
    assert torch.equal(ours, torch.tensor([[[[0.0, 0.2, 1.0]]]]))


def test_float64_is_computed_in_float64() -> None:
    images = random_images(4)
    found = preprocess(torch.float64).normalise(images)
    np.testing.assert_array_equal(found.numpy(), (images.numpy().astype(np.float64) / 255 - 0.5) / 0.25)


def test_floating_images_are_not_divided_by_255() -> None:
    images = torch.rand(2, 1, 4, 4)
    before = images.clone()
    plain = Preprocess(AugmentConfig(), 5, None, None, torch.float32, CPU)
    assert torch.equal(plain.normalise(images), images)
    assert torch.equal(preprocess().normalise(images), (images - 0.5) / 0.25)
    assert torch.equal(images, before)


def test_normalise_leaves_its_input_alone() -> None:
    images = random_images(3)
    before = images.clone()
    preprocess(shift=1, flip=True, cutout=2).for_training(images, 0, torch.arange(3))
    assert torch.equal(images, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_images_are_mirrored_and_normalised_to_the_same_bits(dtype: torch.dtype) -> None:
    images, ids = random_images(6, 3, 160, 160), torch.arange(40, 46)
    before = images.clone()
    made = preprocess(dtype, flip=True)
    plain = images.to(dtype) / 255
    plain = (plain - 0.5) / 0.25
    assert torch.equal(made.normalise(images), plain)
    mirrored = [bool(drawn(2, 3, i, 2)) for i in ids.tolist()]
    assert set(mirrored) == {True, False}
    expected = torch.stack([image.flip(2) if flip else image for image, flip in zip(plain, mirrored, strict=True)])
    found = made.for_training(images, 3, ids)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    assert torch.equal(images, before)


def test_flip_mirrors_the_samples_that_the_reference_says() -> None:
    images, ids = random_images(40), torch.arange(40)
    found = preprocess(flip=True).for_training(images, 2, ids)
    plain = preprocess().normalise(images)
    mirrored = [bool(drawn(2, 2, i, 2)) for i in range(40)]
    assert 10 < sum(mirrored) < 30
    for i in range(40):
        assert torch.equal(found[i], plain[i].flip(2) if mirrored[i] else plain[i])


def test_an_alternating_flip_shows_each_image_both_ways_in_turn() -> None:
    images, ids = random_images(40), torch.arange(40)
    plain = preprocess().normalise(images)
    mirrored = torch.tensor([bool(drawn(2, 0, i, 2)) for i in range(40)])
    for epoch in range(4):
        found = preprocess(flip="alternating").for_training(images, epoch, ids)
        ways = mirrored ^ bool(epoch % 2)
        assert torch.equal(found, torch.where(ways.view(-1, 1, 1, 1), plain.flip(3), plain))


@pytest.mark.parametrize(("channels", "reach"), [(1, 2), (3, 5)])
def test_a_reflected_shift_is_numpys_padding(channels: int, reach: int) -> None:
    images = random_images(2 * reach + 1, channels)
    dy = torch.arange(2 * reach + 1)
    dx = (3 * dy) % (2 * reach + 1)
    found = shift_reflected(images, dy, dx, reach).numpy()
    for i, image in enumerate(images.numpy()):
        padded = np.pad(image, [(0, 0), (reach, reach), (reach, reach)], mode="reflect")
        y, x = int(dy[i]), int(dx[i])
        np.testing.assert_array_equal(found[i], padded[:, y : y + 6, x : x + 9])


def test_a_reflected_shift_as_far_as_the_image_is_refused() -> None:
    made = preprocess(shift=6, shift_padding="reflect")
    with pytest.raises(ConfigError, match="mirrors less than an image's side of 6 pixels, and shift is 6"):
        made.for_training(random_images(2), 0, torch.arange(2))


def test_shift_moves_the_samples_as_far_as_the_reference_says() -> None:
    images, ids = random_images(40), torch.arange(40)
    found = preprocess(shift=2).for_training(images, 1, ids)
    for i in range(40):
        down, right = 2 - drawn(0, 1, i, 5), 2 - drawn(1, 1, i, 5)
        expected = preprocess().normalise(torch.from_numpy(moved(images[i].numpy(), down, right))[None])
        assert torch.equal(found[i], expected[0])


def test_cutout_sets_a_square_to_the_mean() -> None:
    images, ids = torch.full((30, 1, 6, 9), 255, dtype=torch.uint8), torch.arange(30)
    found = preprocess(cutout=3).for_training(images, 0, ids)
    for i in range(30):
        y, x = drawn(3, 0, i, 6), drawn(4, 0, i, 9)
        inside = [(r, c) for r in range(6) for c in range(9) if abs(r - y) <= 1 and abs(c - x) <= 1]
        assert found[i, 0].eq(0).nonzero().tolist() == [list(place) for place in inside]


@pytest.mark.parametrize(
    "augment", [{"shift": 2}, {"flip": True}, {"cutout": 3}, {"shift": 1, "flip": True, "cutout": 2}]
)
def test_a_sample_looks_the_same_in_any_batch(augment: dict[str, Any]) -> None:
    images, change = random_images(24), preprocess(**augment)
    whole = change.for_training(images, 3, torch.arange(24))
    shuffled = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    for part in shuffled.split([1, 3, 20]):
        assert torch.equal(change.for_training(images[part], 3, part), whole[part])


@pytest.mark.parametrize("augment", [{"shift": 2}, {"flip": True}, {"cutout": 3}])
def test_epochs_and_seeds_differ(augment: dict[str, Any]) -> None:
    images, ids = random_images(24), torch.arange(24)
    other_seed = Preprocess(AugmentConfig(**augment), 6, (0.5,), (0.25,), torch.float32, CPU)
    first = preprocess(**augment).for_training(images, 0, ids)
    assert not torch.equal(first, preprocess(**augment).for_training(images, 1, ids))
    assert not torch.equal(first, other_seed.for_training(images, 0, ids))


def test_switching_one_change_on_leaves_the_others_as_they_were() -> None:
    images, ids = random_images(24), torch.arange(24)
    both = preprocess(shift=2, flip=True).for_training(images, 0, ids)
    flipped = torch.tensor([bool(drawn(2, 0, i, 2)) for i in range(24)]).view(-1, 1, 1, 1)
    shifted = preprocess(shift=2).for_training(images, 0, ids)
    assert torch.equal(both, torch.where(flipped, shifted.flip(3), shifted))
