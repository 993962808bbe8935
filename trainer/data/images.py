"""A folder of images as a data set."""

import errno

from torch import Tensor

from configs.errors import EnvironmentProblem, TrainingError
from configs.schema import DataConfig
from configs.text import printable
from trainer.data.bad_images import BadImages
from trainer.data.decode import DecodingError, read_pixels
from trainer.data.folder import Files


class ImageSplit:
    """One split of a folder of images; sample i is file i, in the order of the paths' bytes."""

    def __init__(self, files: Files, name: str, config: DataConfig, bad: BadImages | None = None) -> None:
        self.files, self.name = files, name
        self.channels = config.channels
        self.bad = bad
        """Where an image that cannot be decoded is listed; None: it is an error."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The image, uint8 (channels, H, W), and its class.

        In place of one that cannot be decoded it is the first after it that can be, from the last on to the first: the
        same one whoever reads it, and as often as it is read.
        """
        bad: list[tuple[str, str]] = []
        for number in (*range(index, len(self)), *range(index)):
            path = self.files.path(number)
            try:
                pixels = self._read(path)
            except DecodingError as error:
                if self.bad is None:
                    raise TrainingError(
                        f"{printable(path)} (sample {number} of the {self.name} split) cannot be decoded: {error}; "
                        "repair it, take it away, or set data.on_bad_image=skip"
                    ) from error
                bad.append((path, str(error)))
            else:
                self._list(bad, path)
                return pixels, int(self.files.labels[number])
        self._list(bad, "nothing")
        raise TrainingError(f"none of the {len(self)} images of the {self.name} split can be decoded")

    def _list(self, bad: list[tuple[str, str]], instead: str) -> None:
        for path, why in bad:
            assert self.bad is not None
            self.bad.add(path, why, instead)

    def _read(self, path: str) -> Tensor:
        try:
            return read_pixels(path, self.channels)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            # Not the image's fault, and perhaps gone in a minute: another in its place would be another training.
            raise EnvironmentProblem(f"cannot read {printable(path)}: {error.strerror}; look at the disk") from error
