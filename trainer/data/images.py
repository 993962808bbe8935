"""A folder of images as a data set."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainer.data.folder import Files


class ImageSplit:
    """One split of a folder of images; sample i is file i, in the order of the paths' bytes."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The image, uint8 (3, H, W), and its class."""
        with Image.open(self.files.path(index)) as image:
            pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
        return pixels, int(self.files.labels[index])
