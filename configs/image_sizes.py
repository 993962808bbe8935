"""The sides of training images, where they change."""

from configs.data_section import DataConfig, ProgressiveConfig


def progressive_size(data: DataConfig, epoch: int) -> int:
    """Side in pixels of the training images of an epoch that grow: by a straight line, in multiples of 32, as FFCV has
    them grow (https://github.com/libffcv/ffcv-imagenet)."""
    start, end = data.progressive.start_size, data.image_size
    first, last = data.progressive.from_epoch, data.progressive.until_epoch
    assert start is not None
    assert end is not None
    if epoch <= first:
        return start
    if epoch >= last:
        return end
    size = 32 * round((start + (end - start) * (epoch - first) / (last - first)) / 32)
    return min(max(size, start), end)


def training_sizes(data: DataConfig) -> tuple[int, ...]:
    """Every side in pixels that training images may have, from the smallest on; none where it is always the same."""
    if data.progressive.start_size is not None:
        epochs = range(data.progressive.from_epoch, data.progressive.until_epoch + 1)
        return tuple(sorted({progressive_size(data, epoch) for epoch in epochs}))
    return tuple(sorted(set(data.image_sizes)))


def evaluation_view(data: DataConfig) -> tuple[int, int, str] | None:
    """(pixels of the shorter side, side of the middle that is seen, interpolation); None: images stay as they are."""
    side = data.eval_image_size or data.image_size
    if side is None:
        return None
    interpolation = "bicubic" if data.interpolation == "random" else data.interpolation
    return data.resize_size or round(side * 8 / 7), side, interpolation


def at_largest_size(data: DataConfig) -> DataConfig:
    """`data` with all training images as large as any will be."""
    largest = max(training_sizes(data), default=data.image_size)
    seen = data.eval_image_size or data.image_size
    return data.model_copy(
        update={
            "image_size": largest,
            "eval_image_size": seen,
            "image_sizes": (),
            "progressive": ProgressiveConfig(),
        }
    )
