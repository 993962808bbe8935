"""How fast this machine reads streamed data with so many loader workers. Used by `plan --probe`."""

import copy
import time

from trainer.data import workers
from trainer.data.stream import StreamSource
from trainer.data.workers import PREFETCH
from trainer.job import Job

_LONG_ENOUGH_S = 2.0
_NUMBERS = (1, 2, 4, 8)


def measure_input(job: Job, num_workers: int, cores: int) -> dict[str, float]:
    """Images/s of one process's batches, by number of workers: the planned one, and others that there are cores for.
    Empty where data are resident. The workers have the machine for themselves: no step runs beside them."""
    if not isinstance(job.source, StreamSource):
        return {}
    numbers = sorted({number for number in _NUMBERS if number <= cores} | {num_workers})
    return {str(number): _rate(job, job.source, number) for number in numbers}


def _rate(job: Job, source: StreamSource, number: int) -> float:
    source = copy.copy(source)
    source.num_workers = number
    batches = source.training(job.order.batches(0, 0))
    for _ in range(1 + number * PREFETCH):  # the workers start, and what they read ahead took no time of ours
        next(batches)
    images, start = 0, time.perf_counter()
    while images == 0 or time.perf_counter() - start < _LONG_ENOUGH_S:
        images += next(batches)[0].size
    seconds = time.perf_counter() - start
    workers.tidy_up()
    return images / seconds
