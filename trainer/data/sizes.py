"""The side of training images, where it is not always the same: a pure function of (seed, epoch, batch), so that all
ranks and workers agree on it."""

from configs.data_section import DataConfig
from configs.image_sizes import progressive_size
from trainer.data.order import key_of
from trainer.data.streams import Stream


def size_at(config: DataConfig, seed: int, epoch: int, batch: int) -> int | None:
    """Pixels, of all images of batch number `batch` of its epoch; None: data.image_size."""
    if config.image_sizes:
        return config.image_sizes[key_of(seed, epoch, Stream.SIZE, batch) % len(config.image_sizes)]
    if config.progressive.start_size is not None:
        return progressive_size(config, epoch)
    return None
