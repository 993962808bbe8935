"""What every test leaves as it found it: the environment, its children and its threads."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from tqdm import tqdm

FOLDERS = {"unit", "dist", "e2e", "gpu"}

# A thread, once it is started, and nothing forks well beside one.
tqdm.monitor_interval = 0


def pytest_configure() -> None:
    """Under `nohup` SIGHUP is ignored, in a script's background (`&`) SIGINT, by children too; the tests send both."""
    for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A run of the whole suite that does not find one of its folders is no run of the whole suite."""
    found = {item.path.relative_to(config.rootpath / "tests").parts[0] for item in items}
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not found >= FOLDERS:
        raise pytest.UsageError(f"no tests were collected in {', '.join(sorted(FOLDERS - found))}")


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    before = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    threads = set(threading.enumerate())
    yield
    after = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    assert after == before, "the test changed the environment"
    left = [thread for thread in set(threading.enumerate()) - threads if not thread.daemon]
    assert not left, f"threads left: {left}"
    assert not multiprocessing.active_children(), "processes left"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Forked children hang if their parent ever ran an operation on several threads."""
    torch.set_num_threads(1)
