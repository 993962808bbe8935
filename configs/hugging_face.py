"""The settings `data.huggingface`, and where the index of such a data set lies: the files of its splits, found once, so
that every later start reads the same ones. No torch and no `datasets`."""

import hashlib
import json
from pathlib import Path

from pydantic import Field

from configs.values import Section


class HuggingFaceConfig(Section):
    """Which data set of the package `datasets`, and what in it is what."""

    path: str | None = Field(
        default=None,
        description="huggingface: a folder of save_to_disk or of data files, else a name on the hub (owner/name)",
    )
    subset: str | None = Field(default=None, description="huggingface: what datasets calls the configuration's name")
    revision: str | None = Field(
        default=None, description="huggingface: branch, tag or commit on the hub, looked up once: see docs/images.md"
    )
    train_split: str = Field(default="train", description="huggingface: may be a part, such as train[:90%]")
    eval_split: str = Field(default="validation", description="huggingface: may be a part, such as train[90%:]")
    image_column: str = Field(default="image", description="huggingface: column of type Image")
    label_column: str = Field(
        default="label", description="huggingface: column of type ClassLabel, or with numbers or names"
    )


def index_file(root: str, settings: HuggingFaceConfig) -> Path:
    """One for each way to say which data set it is, under data.root."""
    text = json.dumps(settings.model_dump(mode="json"), sort_keys=True)
    return Path(root) / "huggingface" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
