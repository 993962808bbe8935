"""The arithmetic on what was chosen: slices, batches, steps and learning rates."""

from typing import Any

import pytest

from configs.derive import (
    describe_lr,
    lr_at,
    num_pieces,
    peak_lr,
    plan_batches,
    resolve_precision,
    resolve_workers,
    slice_bounds,
    steps_per_epoch,
    total_steps,
    warmup_steps,
    why_precision,
)
from configs.errors import ConfigError
from configs.schema import RunConfig


def config(**fields: Any) -> RunConfig:
    return RunConfig.model_validate({"max_steps": 10, "global_batch_size": 8, "optim": {"lr": 1.0}} | fields)


def by_global(total: int, cap: int | None = None) -> RunConfig:
    return config(global_batch_size=total, max_per_device_batch_size=cap)


# Slices and batches.


@pytest.mark.parametrize("total", [0, 1, 7, 8, 64, 1000])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 16])
def test_slices_cover_everything_once_and_differ_by_at_most_one(total: int, parts: int) -> None:
    bounds = [slice_bounds(total, part, parts) for part in range(parts)]
    assert [index for start, end in bounds for index in range(start, end)] == list(range(total))
    sizes = {end - start for start, end in bounds}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("cap", [None, 1, 2, 3, 5, 8, 32])
def test_every_sample_of_a_global_batch_is_in_exactly_one_micro_batch(world_size: int, cap: int | None) -> None:
    for total in (*range(world_size, 40), 64, 96, 127, 128):
        plan = plan_batches(by_global(total, cap), world_size)
        assert plan.global_batch_size == total
        seen: list[int] = []
        sizes: list[int] = []
        for rank in range(world_size):
            start, end = slice_bounds(total, rank, world_size)
            assert 1 <= end - start <= plan.max_slice
            for micro_batch in range(plan.gradient_accumulation_steps):
                first, last = slice_bounds(end - start, micro_batch, plan.gradient_accumulation_steps)
                seen += range(start + first, start + last)
                sizes.append(last - first)
        assert seen == list(range(total))
        assert max(sizes) == plan.max_micro_batch <= (cap or total)
        assert plan.is_even == (len(set(sizes)) == 1)


@pytest.mark.parametrize(("augment", "unit"), [({"mixup": 0.2}, 2), ({"cutmix": 1.0, "repeats": 3}, 2)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("cap", [None, 6, 7, 8, 32])
@pytest.mark.parametrize("shards", [0, 4])
def test_what_is_mixed_is_never_parted(
    augment: dict[str, Any], unit: int, world_size: int, cap: int | None, shards: int
) -> None:
    parts = shards or world_size
    if parts % world_size:
        return
    for total in (*range((parts - 1) * unit + 1, 60), 128):
        chosen = config(
            global_batch_size=total, max_per_device_batch_size=cap, virtual_shards=shards, data={"augment": augment}
        )
        plan = plan_batches(chosen, world_size)
        seen: list[int] = []
        pieces: list[int] = []
        for part in range(parts):
            start, end = slice_bounds(total, part, parts, unit)
            assert start % unit == 0
            number = num_pieces(total, part, parts, plan.max_micro_batch, unit)
            pieces.append(number)
            for piece in range(number):
                first, last = slice_bounds(end - start, piece, number, unit)
                assert first % unit == 0
                assert 0 < last - first <= plan.max_micro_batch
                seen += range(start + first, start + last)
        assert seen == list(range(total))
        assert plan.max_micro_batch <= (cap or total)
        assert plan.gradient_accumulation_steps == max(pieces) * parts // world_size
        slices = [slice_bounds(total, rank, world_size, unit) for rank in range(world_size)]
        assert plan.max_slice == max(end - start for start, end in slices)
        if cap is None:
            assert pieces == [1] * parts


def test_too_few_pairs_are_refused_with_the_numbers() -> None:
    mixed: dict[str, Any] = {"global_batch_size": 4, "data": {"augment": {"mixup": 0.2}}}
    assert plan_batches(config(**mixed), 2).max_slice == 2
    expected = "^global_batch_size=4, in groups of 2 that are mixed with each other, is smaller than the number of proc"
    with pytest.raises(ConfigError, match=f"{expected}esses, 3; use global_batch_size=5 or more, or no more than 2 of"):
        plan_batches(config(**mixed), 3)
    with pytest.raises(ConfigError, match="mixed with each other, is smaller than virtual_shards=4; use a larger"):
        plan_batches(config(**mixed, virtual_shards=4), 1)
    with pytest.raises(ValueError, match="max_per_device_batch_size: 1 would part images that are mixed; use 2"):
        config(**mixed, max_per_device_batch_size=1)
    assert plan_batches(config(**mixed), 1, 1).max_micro_batch == 2  # remembered from before mixing


@pytest.mark.parametrize("found", [1, 3, 4, 7, 100])
def test_what_fits_in_memory_cuts_like_a_cap_of_the_users(found: int) -> None:
    assert plan_batches(by_global(30), 2, found) == plan_batches(by_global(30, found), 2)
    assert plan_batches(by_global(30, 5), 2, found) == plan_batches(by_global(30, min(5, found)), 2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("cap", [None, 3, 4])
def test_a_batch_size_per_device_gives_each_rank_as_many(world_size: int, cap: int | None) -> None:
    chosen = config(global_batch_size=None, per_device_batch_size=4, max_per_device_batch_size=cap)
    plan = plan_batches(chosen, world_size)
    assert (plan.global_batch_size, plan.max_slice) == (4 * world_size, 4)
    assert (plan.gradient_accumulation_steps, plan.max_micro_batch) == ((2, 2) if cap == 3 else (1, 4))
    assert plan.is_even


@pytest.mark.parametrize(
    ("total", "cap", "world_size", "text"),
    [
        (256, 32, 4, "per-device 32 x 4 processes x accumulation 2 = global 256"),
        (256, None, 1, "per-device 256 x 1 process x accumulation 1 = global 256"),
        (
            9,
            None,
            2,
            "per-device 5 x 2 processes x accumulation 1 = global 9, cut into uneven slices (exact all the same)",
        ),
    ],
)
def test_the_plan_says_its_arithmetic(total: int, cap: int | None, world_size: int, text: str) -> None:
    assert plan_batches(by_global(total, cap), world_size).describe() == text


def test_fewer_samples_than_processes_are_refused_with_both_numbers() -> None:
    expected = "^global_batch_size=1 is smaller than the number of processes, 2; use global_batch_size=2 or more"
    with pytest.raises(ConfigError, match=expected):
        plan_batches(by_global(1), 2)


@pytest.mark.parametrize(
    ("num_samples", "total", "drop_last", "steps"),
    [
        (64, 8, False, 8),
        (64, 8, True, 8),
        (65, 8, False, 9),
        (65, 8, True, 8),
        (3, 8, False, 1),
        (8, 8, True, 1),
        (60_000, 64, False, 938),
    ],
)
def test_steps_of_an_epoch(num_samples: int, total: int, drop_last: bool, steps: int) -> None:
    assert steps_per_epoch(num_samples, total, drop_last=drop_last) == steps


def test_an_epoch_without_steps_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match="leaves nothing of 7 samples at global_batch_size=8; use drop_last: false or"
    ):
        steps_per_epoch(7, 8, drop_last=True)
    with pytest.raises(ConfigError, match="the training split is empty: 0 samples"):
        steps_per_epoch(0, 8, drop_last=False)


def test_total_steps_come_from_steps_or_epochs() -> None:
    assert total_steps(config(max_steps=11), 938) == 11
    assert total_steps(config(max_steps=None, max_epochs=5), 938) == 4690


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ({}, 0),
        ({"name": "cosine"}, 0),
        ({"name": "one_cycle"}, 3),
        ({"name": "one_cycle", "warmup_steps": 0}, 0),
        ({"warmup_steps": 4}, 4),
        ({"warmup_epochs": 0.5}, 10),
        ({"warmup_epochs": 0}, 0),
    ],
)
def test_warmup_is_given_in_steps_or_epochs(schedule: dict[str, Any], steps: int) -> None:
    assert warmup_steps(config(schedule=schedule), 20) == steps


# Learning rates. Steps are counted in completed updates, so nothing here knows the number of processes (problem 4).


def rates(steps: range, schedule: dict[str, Any], batches_per_epoch: int = 5, **fields: Any) -> list[float]:
    return [lr_at(step, config(schedule=schedule, **fields), batches_per_epoch) for step in steps]


def test_cosine_over_ten_steps() -> None:
    # Problem 4 of the list of real faults; also CosineAnnealingLR(T_max=10) of torch 2.14.1 after each of its steps.
    expected = [0.976, 0.905, 0.794, 0.655, 0.500, 0.345, 0.206, 0.095, 0.024, 0.000]
    assert [round(rate, 3) for rate in rates(range(1, 11), {"name": "cosine"})] == expected
    assert rates(range(1), {"name": "cosine"}) == [1.0]
    assert rates(range(10, 13), {"name": "cosine", "final_lr_fraction": 0.1}) == pytest.approx([0.1] * 3)


def test_linear_goes_up_and_down_in_straight_lines() -> None:
    schedule = {"name": "linear", "warmup_steps": 4, "warmup_start_fraction": 0.2, "final_lr_fraction": 0.1}
    expected = [0.2, 0.4, 0.6, 0.8, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.1]
    assert rates(range(12), schedule) == pytest.approx(expected)


def test_one_cycle_is_torchs() -> None:
    # By torch 2.14.1: OneCycleLR(max_lr=1, total_steps=11, pct_start=4/11, final_div_factor=4). It counts the
    # rate that it ends at as a step; here that is the rate after the 10th update, as with cosine, hence 11 and 4/11.
    expected = [0.04, 0.28, 0.76, 1.0, 0.95098, 0.813627, 0.615148, 0.394852, 0.196373, 0.05902, 0.01]
    assert rates(range(11), {"name": "one_cycle", "final_lr_fraction": 0.01}) == pytest.approx(expected, abs=1e-6)


def test_one_cycle_by_hand() -> None:
    # Up from 1/25 over 4 of 12 steps, down over 8: half way up is (1/25 + 1) / 2, half way down is 1/2.
    found = rates(range(13), {"name": "one_cycle", "warmup_steps": 4}, max_steps=12)
    assert [found[step] for step in (0, 2, 4, 8, 12)] == pytest.approx([0.04, 0.52, 1.0, 0.5, 0.0])
    assert found[:5] == sorted(found[:5])
    assert found[4:] == sorted(found[4:], reverse=True)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "step"])
def test_warmup_is_linear_and_its_first_update_already_moves(name: str) -> None:
    assert rates(range(5), {"name": name, "warmup_steps": 4}) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_constant_and_step() -> None:
    assert rates(range(20), {}) == [1.0] * 20
    by_step = {"name": "step", "step_every_epochs": 2, "step_factor": 0.1}
    found = rates(range(30), by_step, max_steps=30)
    assert found == pytest.approx([1.0] * 10 + [0.1] * 10 + [0.01] * 10)


@pytest.mark.parametrize("name", ["constant", "cosine", "step", "one_cycle"])
@pytest.mark.parametrize("warmup", [None, 0, 1, 10, 50])
def test_rates_stay_between_zero_and_the_peak_past_the_end_too(name: str, warmup: int | None) -> None:
    found = rates(range(100), {"name": name, "warmup_steps": warmup})
    assert all(0.0 <= rate <= 1.0 for rate in found)


# Precision.


@pytest.mark.parametrize(
    ("fields", "device", "has_amx", "precision"),
    [
        ({}, "cuda", False, "fp16"),
        ({}, "cpu", True, "bf16"),
        ({}, "cpu", False, "no"),
        ({}, "mps", True, "no"),
        ({"mixed_precision": "fp16"}, "cpu", True, "fp16"),
        ({"mixed_precision": "no"}, "cuda", True, "no"),
        ({"dtype": "float64"}, "cuda", True, "no"),
    ],
)
def test_what_auto_precision_means(fields: dict[str, Any], device: str, has_amx: bool, precision: str) -> None:
    assert resolve_precision(config(**fields), device, has_amx=has_amx) == precision


@pytest.mark.parametrize(
    ("fields", "device", "has_amx", "why"),
    [
        ({}, "cuda", True, "auto: on cuda"),
        ({}, "cpu", True, "auto: this CPU has AMX"),
        ({}, "cpu", False, "auto: this CPU has no AMX"),
        ({"dtype": "float64"}, "cuda", True, "auto: dtype is float64"),
        ({"mixed_precision": "bf16"}, "cuda", True, ""),
    ],
)
def test_the_precision_has_a_reason(fields: dict[str, Any], device: str, has_amx: bool, why: str) -> None:
    assert why_precision(config(**fields), device, has_amx=has_amx) == why


@pytest.mark.parametrize(
    ("workers", "device", "cores", "ranks", "shm_mib", "found"),
    [
        ("auto", "cpu", 64, 1, 4096, (2, "auto: the cores compute on cpu")),
        ("auto", "cuda", 16, 2, 4096, (7, "auto: 16 cores / 2 processes - 1, from 1 to 8")),
        ("auto", "cuda", 64, 1, 512, (8, "auto: 64 cores / 1 process - 1, from 1 to 8")),
        ("auto", "cuda", 4, 4, 4096, (1, "auto: 4 cores / 4 processes - 1, from 1 to 8")),
        (
            "auto",
            "cuda",
            16,
            1,
            300,
            (4, "auto: 16 cores / 1 process - 1, from 1 to 4, which shared memory has room for"),
        ),
        (
            "auto",
            "cuda",
            16,
            1,
            64,
            (2, "auto: 16 cores / 1 process - 1, from 1 to 2, which shared memory has room for"),
        ),
        (0, "cuda", 64, 1, 4096, (0, "")),
        (5, "cpu", 2, 2, 64, (5, "")),
    ],
)
def test_loader_workers_by_cores_beside_gpus(
    workers: Any, device: str, cores: int, ranks: int, shm_mib: int, found: tuple[int, str]
) -> None:
    assert resolve_workers(config(data={"num_workers": workers}), device, cores, ranks, shm_mib * 2**20) == found


def test_shards_divide_over_the_processes_and_all_have_samples() -> None:
    plan = plan_batches(config(virtual_shards=4, global_batch_size=10, max_per_device_batch_size=2), 2)
    # Shards of 2, 3, 2 and 3 samples; those of 3 are two micro-batches.
    assert (plan.max_slice, plan.max_micro_batch, plan.gradient_accumulation_steps) == (5, 2, 4)
    with pytest.raises(ConfigError, match="virtual_shards=4 does not divide over 3 processes; use one of 1, 2, 4 proc"):
        plan_batches(config(virtual_shards=4, global_batch_size=12), 3)
    with pytest.raises(ConfigError, match="global_batch_size=2 is smaller than virtual_shards=4"):
        plan_batches(config(virtual_shards=4, global_batch_size=2), 1)


@pytest.mark.parametrize(
    ("rule", "peak", "said"),
    [
        ("none", 0.1, ""),
        ("linear", 0.4, "lr 0.1 x 1024/256 = 0.4"),
        ("sqrt", 0.2, "lr 0.1 x sqrt(1024/256) = 0.2"),
    ],
)
def test_the_rate_grows_with_the_batch_where_that_is_asked_for(rule: str, peak: float, said: str) -> None:
    settings = {"max_epochs": 1, "global_batch_size": 1024, "optim": {"lr": 0.1, "lr_scaling": rule}}
    config = RunConfig.model_validate(settings)
    assert peak_lr(config) == pytest.approx(peak)
    assert lr_at(0, config, 10) == pytest.approx(peak)
    assert describe_lr(config) == said


def test_a_rate_that_grows_with_the_batch_needs_one() -> None:
    with pytest.raises(ValueError, match=r"lr_scaling needs global_batch_size"):
        RunConfig.model_validate({"max_epochs": 1, "per_device_batch_size": 8, "optim": {"lr_scaling": "linear"}})


def test_a_warm_up_from_a_fraction() -> None:
    schedule = {"warmup_steps": 4, "warmup_start_fraction": 0.2}
    config = RunConfig.model_validate({"max_epochs": 1, "global_batch_size": 8, "schedule": schedule})
    assert [lr_at(step, config, 10) for step in range(6)] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])
