import pytest

from trainer.compiling import can_pay, judge


@pytest.mark.parametrize(
    ("eager_s", "compiled_s", "compile_s", "steps", "pays", "why"),
    [
        # 4 ms are gained in each step: 40 s in 10,000, 20 s in 5,000.
        (0.010, 0.006, 30.0, 10_000, True, "6 ms a step, 10 without: 10000 steps save 40 s, compiling takes 30 s"),
        (0.010, 0.006, 30.0, 5_000, False, "6 ms a step, 10 without: 5000 steps save 20 s, compiling takes 30 s"),
        (0.010, 0.012, 30.0, 10_000, False, "no gain, 12 ms a step, 10 without"),
        (0.010, 0.0096, 0.0, 10_000, False, "no gain, 9.6 ms a step, 10 without"),
        (0.010, 0.010, 0.0, 10_000, False, "no gain, 10 ms a step, 10 without"),
    ],
)
def test_what_is_gained_has_to_bring_in_the_compilation(
    eager_s: float, compiled_s: float, compile_s: float, steps: int, pays: bool, why: str
) -> None:
    assert judge(eager_s, compiled_s, compile_s, steps) == (pays, why)


def test_a_job_that_half_its_time_would_not_pay_for_is_not_measured() -> None:
    assert not can_pay(0.001, 19_999)
    assert can_pay(0.001, 20_001)
