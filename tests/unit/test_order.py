import pytest
import torch

from configs.errors import ConfigError
from tests import splitmix
from trainer.data.order import (
    Order,
    RankBatch,
    cut_for_rank,
    epoch_permutation,
    hash_of,
    key_of,
    random_integers,
)


def order(size: int, batch: int, rank: int = 0, world: int = 1, cap: int = 10**6, drop_last: bool = False) -> Order:
    return Order(size, 3, batch, drop_last, rank, world, cap, torch.device("cpu"))


def taken(order: Order, count: int, epoch: int = 0, first: int = 0) -> list[RankBatch]:
    batches = order.batches(epoch, first)
    return [next(batches) for _ in range(count)]


def one_epoch(size: int, batch: int, world: int, cap: int, epoch: int = 0) -> list[list[RankBatch]]:
    """By batch, then by rank."""
    orders = [order(size, batch, rank, world, cap) for rank in range(world)]
    return list(zip(*(taken(o, o.batches_per_epoch, epoch) for o in orders), strict=True))


def real_ids(batches: list[RankBatch]) -> list[int]:
    return [i for batch in batches if not batch.is_dummy for piece in batch.pieces for i in piece.tolist()]


def test_hash_gives_the_published_values_of_splitmix64() -> None:
    # The reference values that circulate with the C code of https://prng.di.unimi.it/splitmix64.c, seed 1234567.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [value % 2**64 for value in hash_of(1234567, torch.arange(5)).tolist()] == published


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_hash_agrees_with_python_integers(seed: int) -> None:
    found = [value % 2**64 for value in hash_of(seed, torch.arange(50)).tolist()]
    assert found == splitmix.first_outputs(seed, 50)
    assert [value % 2**64 for value in hash_of(seed, torch.tensor([[49], [7]])).flatten().tolist()] == [
        found[49],
        found[7],
    ]


@pytest.mark.parametrize(
    ("parts", "key"),
    [((0,), 16294208416658607535), ((7, 3), 17670481865470212032), ((0, 0, 0), None), ((2**63 - 1, 5), None)],
)
def test_key_folds_its_parts(parts: tuple[int, ...], key: int | None) -> None:
    assert key_of(*parts) == splitmix.key(*parts) == (key or splitmix.key(*parts))


def test_keys_of_neighbours_differ() -> None:
    keys = {key_of(seed, epoch, kind) for seed in range(10) for epoch in range(10) for kind in range(10)}
    assert len(keys) == 1000


@pytest.mark.parametrize(
    ("size", "seed", "epoch", "golden"),
    [
        (10, 0, 0, [9, 4, 6, 3, 1, 0, 7, 8, 2, 5]),
        (10, 0, 1, [0, 6, 3, 2, 9, 4, 1, 7, 5, 8]),
        (10, 7, 2, [6, 3, 8, 2, 5, 7, 4, 1, 9, 0]),
        (5, 2**63 - 1, 0, [3, 1, 4, 0, 2]),
        (1, 0, 0, [0]),
    ],
)
def test_golden_permutations(size: int, seed: int, epoch: int, golden: list[int]) -> None:
    assert epoch_permutation(size, seed, epoch).tolist() == golden == splitmix.permutation(size, seed, epoch)


def test_large_permutation_holds_every_sample_once_and_is_the_reference() -> None:
    found = epoch_permutation(5_000, 1, 4).tolist()
    assert sorted(found) == list(range(5_000))
    assert found == splitmix.permutation(5_000, 1, 4)


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_permutation(20, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_random_integers_are_in_range_and_even() -> None:
    counts = torch.bincount(random_integers(key_of(1), torch.arange(70_000), 7), minlength=7)
    assert len(counts) == 7
    assert counts.sum() == 70_000
    assert (counts - 10_000).abs().max() < 500  # five standard deviations


@pytest.mark.parametrize("cap", [1, 2, 1000])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("size", "batch"), [(1, 7), (7, 7), (20, 7), (22, 8), (64, 9), (15, 100)])
def test_every_sample_once_an_epoch_in_slices_of_rule_1(size: int, batch: int, world: int, cap: int) -> None:
    permutation = splitmix.permutation(size, 3, 1)
    batches = one_epoch(size, batch, world, cap, epoch=1)
    assert len(batches) == -(-size // batch)
    for index, ranks in enumerate(batches):
        expected = permutation[index * batch : (index + 1) * batch]
        assert real_ids(ranks) == expected
        n = len(expected)
        for rank, part in enumerate(ranks):
            low, high = rank * n // world, (rank + 1) * n // world
            assert (part.epoch, part.index, part.size) == (1, index, n)
            assert part.is_dummy == (low == high)
            if not part.is_dummy:
                assert torch.cat(part.pieces).tolist() == expected[low:high]
                assert max(map(len, part.pieces)) <= cap
                assert max(map(len, part.pieces)) - min(map(len, part.pieces)) <= 1


@pytest.mark.parametrize(
    ("last", "dummies"), [(1, [True, True, False]), (2, [True, False, False]), (3, [False, False, False])]
)
def test_rank_without_samples_gets_one_dummy(last: int, dummies: list[bool]) -> None:
    ids = torch.arange(10, 10 + last)
    cut = [cut_for_rank(ids, rank, 3, 1000) for rank in range(3)]
    assert [is_dummy for _, is_dummy in cut] == dummies
    assert [len(torch.cat(pieces)) for pieces, _ in cut] == [1, 1, 1]
    assert all(pieces[0].tolist() == [10] for pieces, is_dummy in cut if is_dummy)


def test_drop_last_leaves_out_the_smaller_batch() -> None:
    batches = taken(order(20, 7, drop_last=True), 4)
    assert [(b.epoch, b.index, b.size) for b in batches] == [(0, 0, 7), (0, 1, 7), (1, 0, 7), (1, 1, 7)]


def test_drop_last_of_everything_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"nothing of 6 samples at global_batch_size=7"):
        _ = order(6, 7, drop_last=True).batches_per_epoch


def test_position_in_the_middle_goes_on_with_the_same_batches() -> None:
    whole = taken(order(20, 6), 12)
    for start in range(12):
        rest = taken(order(20, 6), 12 - start, epoch=start // 4, first=start % 4)
        for ours, theirs in zip(rest, whole[start:], strict=True):
            assert (ours.epoch, ours.index) == (theirs.epoch, theirs.index)
            assert torch.equal(ours.pieces[0], theirs.pieces[0])
