"""Augmentation on a GPU: the same as on a CPU, and the host waits for nothing."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from configs.augment_section import AugmentConfig
from trainer.data.augment import Preprocess
from trainer.data.mixing import Mixing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
AUGMENT = AugmentConfig(flip=True, erasing=0.5, mixup=0.2, cutmix=1.0, mix_probability=0.8)


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def seen(device: torch.device, *, watched: bool) -> tuple[Tensor, Tensor]:
    preprocess = Preprocess(AUGMENT, 3, (0.5,), (0.25,), torch.float32, device)
    mixing = Mixing(AUGMENT, 3, 10, device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 48, 40), dtype=torch.uint8, generator=generator).to(device)
    labels, draws = (torch.randint(0, 10, (64,), generator=generator).to(device), torch.arange(64).to(device))
    preprocess.for_training(images, 0, draws)  # copies its table to the device once
    if watched:
        torch.cuda.set_sync_debug_mode("error")
    return mixing(preprocess.for_training(images, 1, draws), labels, 1, draws)


def test_a_gpu_does_what_a_cpu_does_without_waiting(waiting_is_an_error: None) -> None:
    images, targets = seen(torch.device("cpu"), watched=False)
    on_gpu = seen(torch.device("cuda"), watched=True)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(on_gpu[1].cpu(), targets)
    torch.testing.assert_close(on_gpu[0].cpu(), images, rtol=1e-5, atol=1e-5)
