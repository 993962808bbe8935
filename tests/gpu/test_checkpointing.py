"""Gradient checkpointing on a GPU: the same statistics and gradients with less memory."""

import pytest
import torch
import torchvision.models  # noqa: F401  # so slow that the worker imports it only where it is asked for
from torch import Tensor

from configs.sections import ModelConfig
from trainer.models import build_model
from trainer.recompute import recompute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def one_pass(name: str, dtype: torch.dtype, *, checkpointing: bool) -> tuple[dict[str, Tensor], int]:
    """Gradients and buffers after a forward and a backward pass, and the most memory that it took, in bytes."""
    model = build_model(ModelConfig(name=name), 10, (3, 128, 128), 0, torch.float32).cuda().train()
    if checkpointing:
        recompute(model)
    images = torch.rand(32, 3, 128, 128, generator=torch.Generator().manual_seed(1)).cuda()
    torch.manual_seed(5)
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        answer = model(images)
    answer.float().square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients | dict(model.named_buffers()), torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b0"])
def test_same_gradients_and_statistics_with_less_memory(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    expected, much = one_pass(name, dtype, checkpointing=False)
    found, less = one_pass(name, dtype, checkpointing=True)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, msg=key)
    counts = [key for key in expected if key.endswith("num_batches_tracked")]
    assert {int(found[key]) for key in counts} == {1}
    assert less < 0.7 * much
