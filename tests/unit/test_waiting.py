"""What is said of a training that waits for its data."""

from typing import Any

import pytest

from trainer.waiting import Reading


def reading(**more: Any) -> Reading:
    plain: dict[str, Any] = {"workers": 2, "ranks": 1, "free_cores": 6, "on_gpu": False, "lacks_simplejpeg": False}
    return Reading(**(plain | more))


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (
            {},
            "63 % of the steps' time went into waiting for data: 2 loader workers read 481 images/s, and the steps "
            "could take 1,300; data.num_workers=8 would help: 6 cores are free",
        ),
        (
            {"on_gpu": True, "ranks": 2, "workers": 4, "free_cores": 3},
            "63 % of the steps' time went into waiting for data: 4 loader workers read 481 images/s; "
            "data.num_workers=3 would help: 3 cores are free",
        ),
        (
            {"workers": 0, "free_cores": 1, "lacks_simplejpeg": True},
            "63 % of the steps' time went into waiting for data: the ranks themselves read 481 images/s, and the steps "
            "could take 1,300; simplejpeg (pip install simplejpeg) and data.num_workers=1 would help: 1 core is free",
        ),
        (
            {"free_cores": 0},
            "63 % of the steps' time went into waiting for data: 2 loader workers read 481 images/s, and the steps "
            "could take 1,300; smaller image files would help; no core is free for more workers",
        ),
    ],
)
def test_what_would_help_is_told_with_figures(machine: dict[str, Any], said: str) -> None:
    assert reading(**machine).describe_wait(0.63, 481) == said


def test_a_training_that_does_nothing_but_wait_has_no_rate_of_its_own() -> None:
    assert "could take" not in reading().describe_wait(1.0, 481)
