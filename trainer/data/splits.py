"""Which data sets of encoded images there are, and who reads them."""

from collections.abc import Callable

from configs.data_section import DataConfig
from configs.known_data import IMAGE_FOLDER, WEBDATASET
from trainer.data.encoded import Splits
from trainer.data.folder import load_folder
from trainer.data.tars import load_tars


def load_splits(config: DataConfig, alive: Callable[[], None] = lambda: None) -> Splits:
    """Both splits, nothing decoded; `alive` is called from time to time. Raises ConfigError for what is none."""
    if config.name == IMAGE_FOLDER:
        return load_folder(config, alive)
    if config.name == WEBDATASET:
        return load_tars(config, alive)
    from trainer.data.tables import load_tables  # needs pyarrow

    return load_tables(config)
