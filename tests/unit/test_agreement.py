import pytest
import torch
from torch import nn

from trainer.agreement import Agreed, HostCopy, WithSignals, agreed_from, signal_values

NAN, INF = float("nan"), float("inf")


def reduced(ranks: list[tuple[float, bool, bool]]) -> list[float]:
    """The mean over ranks of the gradient of `signals`, as DDP takes it, each rank having (loss, stop, save)."""
    gradients = []
    for rank, (loss, stop, save) in enumerate(ranks):
        module = WithSignals(nn.Linear(2, 2), len(ranks), torch.float32)
        _, signals = module(torch.ones(1, 2))
        signals.backward(signal_values(signals, rank, torch.tensor(loss), stop=stop, save=save))
        assert module.signals.grad is not None
        gradients.append(module.signals.grad)
    mean: list[float] = torch.stack(gradients).mean(0).tolist()
    return mean


@pytest.mark.parametrize(
    ("ranks", "agreed"),
    [
        ([(1.0, False, False)] * 4, Agreed(False, False, ())),
        ([(1.0, False, False), (1.0, True, False)], Agreed(True, False, ())),
        ([(1.0, False, True), (1.0, False, False), (2.0, False, False)], Agreed(False, True, ())),
        ([(1.0, False, False), (NAN, False, False)], Agreed(False, False, (1,))),
        ([(INF, False, False), (1.0, True, False), (-INF, False, False)], Agreed(True, False, (0, 2))),
    ],
)
def test_all_ranks_read_the_same(ranks: list[tuple[float, bool, bool]], agreed: Agreed) -> None:
    assert agreed_from(reduced(ranks)) == agreed


def test_one_signal_among_64_ranks_is_heard() -> None:
    ranks = [(1.0, False, False)] * 64
    ranks[63] = (NAN, True, True)
    assert agreed_from(reduced(ranks)) == Agreed(True, True, (63,))


def test_signals_are_no_part_of_the_model() -> None:
    model = nn.Linear(2, 3)
    images = torch.rand(4, 2)
    output, signals = WithSignals(model, 3, torch.float64)(images)
    assert torch.equal(output, model(images))
    assert signals.shape == (6,)
    assert signals.dtype == torch.float64
    assert set(model.state_dict()) == {"weight", "bias"}


def test_host_copy_reads_what_was_there() -> None:
    tensor = torch.tensor([1.0, 2.0])
    copy = HostCopy(tensor)
    assert copy.is_ready
    assert copy.read() == [1.0, 2.0]
    assert HostCopy(torch.tensor(3.0)).read() == [3.0]
