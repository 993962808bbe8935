"""The net for CIFAR-10: what whitening does, and how it begins."""

import pytest
import torch

from configs.sections import ModelConfig
from trainer.models import build_model
from trainer.whitened import WhitenedCNN, Whitening


def test_whitened_patches_have_unit_variance_and_no_correlation() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 16, 16, generator=generator, dtype=torch.float64)
    images = images + images.roll(1, 3) + 0.5 * images.roll(1, 1)  # neighbours and channels go together
    layer = Whitening(3).double()
    layer.begin_with(images.split(24))  # the last batch is smaller
    answers = layer(images).permute(0, 2, 3, 1).reshape(-1, 24)
    half = answers[:, :12]
    assert torch.equal(answers[:, 12:], -half)
    second_moments = half.T @ half / len(half)
    variances = torch.linalg.eigvalsh(patches(images).T @ patches(images) / len(half)).flip(0)
    torch.testing.assert_close(second_moments, torch.diag(variances / (variances + 5e-4)), rtol=1e-9, atol=1e-9)


def patches(images: torch.Tensor) -> torch.Tensor:
    """Each 2 x 2 patch as a row, channel by channel."""
    parts = [images[:, c, y : y + 15, x : x + 15].reshape(-1) for c in range(3) for y in (0, 1) for x in (0, 1)]
    return torch.stack(parts, dim=1)


def test_a_group_passes_its_inputs_on_to_begin_with() -> None:
    conv = WhitenedCNN(10, (3, 32, 32)).groups[0].convs[0]
    images = torch.rand(2, 24, 8, 8)
    torch.testing.assert_close(conv(images)[:, :24], images)
    assert conv(images).shape == (2, 64, 8, 8)


@pytest.mark.parametrize(("depth", "parameters"), [(2, 1_972_792), (3, None)])
def test_its_size(depth: int, parameters: int | None) -> None:
    config = ModelConfig(name="whitened_cnn", args={"depth": depth})
    model = build_model(config, 10, (3, 32, 32), 0, torch.float32)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    if parameters is not None:
        # By hand: 24 (12 + 1); 9 (24 64 + 64 64 + 64 256 + 3 256 256); 2 (2 64 + 4 256) of norms; a head of 2560.
        by_hand = 24 * 13 + 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256) + 2 * (2 * 64 + 4 * 256) + 2560
        assert sum(p.numel() for p in model.parameters()) == by_hand == parameters
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(name.endswith("norms.0.weight") or name == "whitening.conv.weight" for name in learning)
