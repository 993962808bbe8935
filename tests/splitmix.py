"""SplitMix64 with Python's own integers, written from the paper, and what the project makes of it."""

from collections.abc import Iterator

MASK = 2**64 - 1


def outputs(seed: int) -> Iterator[int]:
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def first_outputs(seed: int, count: int) -> list[int]:
    stream = outputs(seed)
    return [next(stream) for _ in range(count)]


def key(*parts: int) -> int:
    """Each part starts a generator where the one before it left off."""
    folded = 0
    for part in parts:
        folded = next(outputs((folded + part) & MASK))
    return folded


def permutation(size: int, seed: int, epoch: int) -> list[int]:
    """Stable sort of the hashes, read as signed 64-bit numbers."""
    hashes = first_outputs(key(seed, epoch), size)
    signed = [value - 2**64 if value >= 2**63 else value for value in hashes]
    return sorted(range(size), key=lambda index: signed[index])
