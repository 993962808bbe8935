"""The search for the largest micro-batch, with memory that is only pretended."""

import pytest

from trainer.probe_batch import estimate_fitting, largest_fitting


class Memory:
    """Holds `size` samples; remembers what was tried."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tried: list[int] = []

    def fits(self, samples: int) -> bool:
        assert samples not in self.tried, "each trial costs a step"
        self.tried.append(samples)
        return samples <= self.size


def test_the_largest_size_is_found_whatever_it_is() -> None:
    for limit in (1, 2, 3, 7, 8, 100):
        for size in range(limit + 3):
            memory = Memory(size)
            assert largest_fitting(memory.fits, limit) == min(size, limit)
            assert all(1 <= tried <= limit for tried in memory.tried)


def test_few_trials_and_none_much_too_large() -> None:
    memory = Memory(700)
    assert largest_fitting(memory.fits, 1_000_000) == 700
    assert len(memory.tried) <= 20
    assert max(memory.tried) == 1024


def test_one_sample_is_tried_last() -> None:
    """BatchNorm refuses to train on one."""
    memory = Memory(5)
    largest_fitting(memory.fits, 64)
    assert 1 not in memory.tried


@pytest.mark.parametrize(
    ("peaks", "budget", "size"),
    [
        ((1100, 1200), 2000, 20),  # 1000 for the rest, 50 a sample
        ((1100, 1200), 1049, 0),
        ((1100, 1200), 999, 0),
        ((1100, 1200), 1e9, 64),
        ((1100, 1100), 2000, 64),
        ((1100, 1090), 2000, 64),
    ],
)
def test_an_estimate_from_two_peaks(peaks: tuple[int, int], budget: float, size: int) -> None:
    assert estimate_fitting((2, 4), peaks, budget, 64) == size
