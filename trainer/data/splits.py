"""Which data sets of encoded images there are, and who reads them."""

from collections.abc import Callable

from configs.data_section import DataConfig
from configs.known_data import HUGGING_FACE, IMAGE_FOLDER, WEBDATASET
from trainer.data.encoded import Splits


def load_splits(config: DataConfig, alive: Callable[[], None] = lambda: None) -> Splits:
    """Both splits, nothing decoded; `alive` is called from time to time. Raises ConfigError for what is none."""
    return {IMAGE_FOLDER: _folder, WEBDATASET: _tars, HUGGING_FACE: _tables}[config.name](config, alive)


def _folder(config: DataConfig, alive: Callable[[], None]) -> Splits:
    from trainer.data.folder import load_folder

    return load_folder(config, alive)


def _tars(config: DataConfig, alive: Callable[[], None]) -> Splits:
    from trainer.data.tars import load_tars

    return load_tars(config, alive)


def _tables(config: DataConfig, alive: Callable[[], None]) -> Splits:
    from trainer.data.tables import load_tables  # needs pyarrow

    return load_tables(config)
