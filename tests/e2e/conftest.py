import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.commands import Place


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.close()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A place where the run `done` is finished; to be read, not changed."""
    place = Place(tmp_path_factory.mktemp("trained"))
    place.run("train", "tiny.yaml", "--run-name", "done")
    yield place
    place.close()


@pytest.fixture
def finished(here: Place, trained: Place) -> Place:
    """A place of one's own with the finished run `done`."""
    shutil.copytree(trained.folder / "runs", here.folder / "runs")
    return here
