import errno
import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from configs.errors import ConfigError, EnvironmentProblem, TrainingError
from trainer.__main__ import _failure, _plain_warning
from trainer.peers import PeerError
from trainer.places import place_of


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ValueError("boom-731"), "ValueError", 1),
        (TrainingError("boom-731"), "training error", 1),
        (ConfigError("boom-731"), "config error", 2),
        (EnvironmentProblem("boom-731"), "environment error", 3),
        (PeerError("boom-731"), "peer", 1),
        (RuntimeError("[gloo/pair.cc] Connection closed by peer [127.0.0.1] boom-731"), "peer", 1),
        (RuntimeError("boom-731"), "RuntimeError", 1),
        (RuntimeError("Read error in boom-731.jpg, Broken pipe"), "RuntimeError", 1),
        (dist.DistNetworkError("boom-731"), "peer", 1),
        (OSError(errno.ENOSPC, "boom-731"), "environment error", 3),
        (FileNotFoundError(errno.ENOENT, "boom-731"), "FileNotFoundError", 1),
        (KeyboardInterrupt("boom-731"), "KeyboardInterrupt", 1),
        (torch.OutOfMemoryError("boom-731"), "OutOfMemoryError", 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: boom-731"), "OutOfMemoryError", 1),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED boom-731"), "OutOfMemoryError", 1),
        (ValueError("can't allocate memory for boom-731"), "ValueError", 1),
    ],
)
def test_failure_names_its_kind(error: BaseException, kind: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = _failure(3, caught(error), None)
    assert (outcome.rank, outcome.status, outcome.kind, outcome.exit_code) == (3, "failed", kind, code)
    assert "boom-731" in (outcome.message or "")
    assert (outcome.where or "").startswith("tests/unit/test_worker_entry.py:")


def test_one_process_has_no_peers() -> None:
    assert _failure(0, caught(RuntimeError("[gloo/pair.cc] Connection closed")), None).kind == "RuntimeError"


def test_failure_names_the_position() -> None:
    run = SimpleNamespace(job=SimpleNamespace(state=SimpleNamespace(step=5, epoch=2)))
    outcome = _failure(0, caught(ValueError("x")), run)
    assert (outcome.step, outcome.epoch) == (5, 2)
    assert _failure(0, caught(ValueError("x")), SimpleNamespace(job=None)).step is None


def test_error_without_text_is_told_by_its_name() -> None:
    assert _failure(0, caught(MemoryError()), None).message == "MemoryError"


@pytest.mark.parametrize(
    "fails", [lambda: json.loads("{"), lambda: torch.zeros(2).expand(3), lambda: F.cross_entropy(None, None)]
)
def test_place_is_the_innermost_line_of_ones_own_code(fails: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        fails()
    assert (place_of(caught.value) or "").startswith("tests/unit/test_worker_entry.py:")


def test_error_that_was_never_raised_has_no_place() -> None:
    assert place_of(ValueError("never raised")) is None


def test_warnings_are_one_line() -> None:
    assert _plain_warning(UserWarning("so slow"), UserWarning, "x.py", 3) == "warning: so slow\n"
