"""How running out of memory looks. No torch: who asks may not have it yet."""

import contextlib
from collections.abc import Iterator

from configs.errors import EnvironmentProblem

# Errors of other classes: the host's allocator, a library's own workspace, Metal, memory outside torch's allocator.
_TEXTS = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
    "CUDA error: out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host where that is the device, had no memory left for a tensor."""
    if any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


@contextlib.contextmanager
def told_if_out_of_memory(where: str, fix: str) -> Iterator[None]:
    """Where smaller micro-batches in training, which is what a restart would try, do not help."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise EnvironmentProblem(f"out of memory {where}: {error}; {fix}") from error
