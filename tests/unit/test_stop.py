import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.run_dir import STOP_SIGNALS as NAMES
from trainer.stop import StopFlag

STOP_SIGNALS = [signal.Signals[name] for name in NAMES]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_sets_the_flag(number: signal.Signals) -> None:
    stop = StopFlag()
    stop.install()
    assert not stop.is_set
    os.kill(os.getpid(), number)
    assert stop.is_set
    assert stop.signal == number.name


def test_first_signal_is_the_one_that_is_told() -> None:
    stop = StopFlag()
    stop.install()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signal == "SIGINT"


def test_request_from_before_the_handlers_stood_is_found(tmp_path: Path) -> None:
    (tmp_path / "stop.json").write_text(json.dumps({"signal": "SIGINT"}))
    stop = StopFlag()
    stop.look_for(tmp_path / "stop.json")
    assert stop.signal == "SIGINT"


def test_no_request_is_no_stop(tmp_path: Path) -> None:
    stop = StopFlag()
    stop.look_for(tmp_path / "stop.json")
    assert not stop.is_set
