"""The order of samples and all randomness, as pure functions of (seed, epoch, index): the same on every device and
world size.

The hash is SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
https://doi.org/10.1145/2660193.2660195): output i of the generator seeded with `key` is a counter-based function of
(key, i), so nothing is carried and any element can be computed alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from configs.derive import num_pieces, slice_bounds, steps_per_epoch

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _signed(value: int) -> int:
    """The 64-bit pattern `value` as torch's int64 reads it."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> 31)


def key_of(*parts: int) -> int:
    """Fold integers such as (seed, epoch) into one unsigned 64-bit key."""
    key = 0
    for part in parts:
        key = extend_key(key, part)
    return key


def extend_key(key: int, part: int) -> int:
    """key_of(*parts, part), where `key` is key_of(*parts)."""
    return _mix((key + _GAMMA + part) & _MASK)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical shift; int64's own `>>` keeps the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def hash_of(key: int, indices: Tensor) -> Tensor:
    """SplitMix64 outputs number `indices` (int64, any shape)
    of the generator seeded with `key`, as int64 bit patterns."""
    values = (indices + 1) * _signed(_GAMMA) + _signed(key)
    values = (values ^ _shift_right(values, 30)) * _signed(_MULTIPLIERS[0])
    values = (values ^ _shift_right(values, 27)) * _signed(_MULTIPLIERS[1])
    return values ^ _shift_right(values, 31)


def random_integers(key: int, indices: Tensor, bound: int) -> Tensor:
    """Integers in [0, bound), int64, one for each index; the bias of the modulo is below bound / 2**31."""
    return _shift_right(hash_of(key, indices), 33) % bound


def uniforms(key: int) -> Iterator[float]:
    """Numbers in [0, 1) of 53 bits, from the outputs of the generator seeded with `key`, in their order."""
    state = key
    while True:
        state = (state + _GAMMA) & _MASK
        yield (_mix(state) >> 11) * 2.0**-53


def epoch_permutation(num_samples: int, seed: int, epoch: int, device: torch.device | str = "cpu") -> Tensor:
    """The order of epoch `epoch`: int64 of shape (num_samples,), a stable sort of the samples' hashes."""
    return torch.argsort(hash_of(key_of(seed, epoch), torch.arange(num_samples, device=device)), stable=True)


@dataclass(slots=True)
class RankBatch:
    """One rank's part of one global batch."""

    epoch: int
    index: int
    """Position of the batch in its epoch."""
    size: int
    """Samples of the global batch, over all ranks."""
    pieces: list[Tensor]
    """Sample indices of each micro-batch, int64. One dummy sample where this rank has none: see `is_dummy`."""
    is_dummy: bool
    """The rank has no sample in this batch: it takes part in the collectives with weight zero."""
    draws: list[Tensor]
    """Of each micro-batch, int64: the samples' indices, plus as many times the size of the split as to tell apart the
    draws of one sample in an epoch. What is random about an image is keyed by them."""
    parts: list[tuple[int, int]]
    """Of each micro-batch: the part of the global batch that it is of, a rank's or a virtual shard's, and its number
    in that part. Keys of what a network draws by itself."""


def cut_for_rank(
    ids: Tensor, rank: int, world_size: int, max_micro_batch: int, unit: int = 1
) -> tuple[list[Tensor], bool]:
    """Cut a global batch's indices into this rank's micro-batches, between groups of `unit`.
    Returns (micro-batches, is_dummy)."""
    start, stop = slice_bounds(len(ids), rank, world_size, unit)
    if start == stop:
        return [ids[:1]], True
    if stop - start <= max_micro_batch:
        return [ids if world_size == 1 else ids[start:stop]], False
    pieces = num_pieces(len(ids), rank, world_size, max_micro_batch, unit)
    bounds = [slice_bounds(stop - start, piece, pieces, unit) for piece in range(pieces)]
    return [ids[start + low : start + high] for low, high in bounds], False


def cut_into_shards(
    ids: Tensor, shards: range, num_shards: int, max_micro_batch: int, unit: int = 1
) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """The micro-batches of these virtual shards; one without samples has none. Returns (micro-batches, parts)."""
    pieces, parts = [], []
    for shard in shards:
        start, stop = slice_bounds(len(ids), shard, num_shards, unit)
        number = num_pieces(len(ids), shard, num_shards, max_micro_batch, unit)
        bounds = [slice_bounds(stop - start, piece, number, unit) for piece in range(number)]
        pieces += [ids[start + low : start + high] for low, high in bounds]
        parts += [(shard, piece) for piece in range(number)]
    return pieces, parts


@dataclass(frozen=True)
class Order:
    """The whole run's order for one rank."""

    num_samples: int
    seed: int
    global_batch_size: int
    drop_last: bool
    rank: int
    world_size: int
    max_micro_batch: int
    device: torch.device
    num_shards: int = 0
    unit: int = 1
    """Samples that are never parted: 2 where pairs are mixed."""
    repeats: int = 1
    """How often a sample comes by, each time with other randomness. Epochs keep their length."""
    draw: Callable[[int], Tensor] | None = None
    """The samples of an epoch, int64 (num_samples,), where not each is drawn once."""

    @cached_property
    def batches_per_epoch(self) -> int:
        return steps_per_epoch(self.num_samples, self.global_batch_size, drop_last=self.drop_last)

    @cached_property
    def draws_each_once(self) -> bool:
        return self.draw is None and self.repeats == 1

    def global_batch(self, epoch: int, index: int) -> Tensor:
        """Sample indices of a whole global batch, over all ranks."""
        return self._draws(epoch)[index * self.global_batch_size :][: self.global_batch_size] % self.num_samples

    def _draws(self, epoch: int) -> Tensor:
        """Of the whole epoch, in its order; see RankBatch.draws."""
        if self.draws_each_once:
            return epoch_permutation(self.num_samples, self.seed, epoch, self.device)
        places = torch.arange(self.num_samples, device=self.device)
        if self.draw is not None:
            return self.draw(epoch).to(self.device) + self.num_samples * places
        order = epoch_permutation(self.num_samples, self.seed, epoch, self.device)
        # a a a b b b; where pairs are mixed a b a b a b, so that no image is mixed with itself.
        group, within = places // (self.unit * self.repeats), places % (self.unit * self.repeats)
        images = (self.unit * group + within % self.unit).clamp(max=self.num_samples - 1)
        return order[images] + self.num_samples * (within // self.unit)

    def _indices(self, draws: list[Tensor]) -> list[Tensor]:
        if self.draws_each_once:
            return draws
        return [draw % self.num_samples for draw in draws]

    def _part_of(self, epoch: int, index: int, ids: Tensor) -> RankBatch:
        if self.num_shards:
            start, stop = slice_bounds(self.num_shards, self.rank, self.world_size)
            draws, parts = cut_into_shards(ids, range(start, stop), self.num_shards, self.max_micro_batch, self.unit)
            return RankBatch(epoch, index, len(ids), self._indices(draws), False, draws, parts)
        draws, is_dummy = cut_for_rank(ids, self.rank, self.world_size, self.max_micro_batch, self.unit)
        parts = [(self.rank, i) for i in range(len(draws))]
        return RankBatch(epoch, index, len(ids), self._indices(draws), is_dummy, draws, parts)

    def batches(self, epoch: int, first: int) -> Iterator[RankBatch]:
        """Batches from position (epoch, first) on, without end. A position in the middle costs nothing to reach."""
        while True:
            cuts = self._draws(epoch).split(self.global_batch_size)
            for index in range(first, self.batches_per_epoch):
                ids = cuts[index]
                yield self._part_of(epoch, index, ids)
            epoch, first = epoch + 1, 0
