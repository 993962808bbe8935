import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Forked children hang if their parent ever ran an operation on several threads."""
    torch.set_num_threads(1)
