from typing import Any

import pytest
from torch import nn

from configs.schema import RunConfig
from trainer.choices import choose_channels_last

CONVOLUTIONS = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
LINEAR = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("setting", "network", "precision", "found"),
    [
        ("auto", CONVOLUTIONS, "fp16", (True, "auto: 2 convolutions in fp16")),
        ("auto", CONVOLUTIONS, "bf16", (True, "auto: 2 convolutions in bf16")),
        ("auto", CONVOLUTIONS, "no", (False, "auto: 2 convolutions in fp32")),
        ("auto", LINEAR, "bf16", (False, "auto: no convolutions")),
        (True, CONVOLUTIONS, "no", (True, "")),
        (False, CONVOLUTIONS, "bf16", (False, "")),
    ],
)
def test_channels_last_where_convolutions_are_in_16_bit(
    setting: Any, network: nn.Module, precision: str, found: tuple[bool, str]
) -> None:
    config = RunConfig(max_epochs=1, global_batch_size=8, channels_last=setting)
    assert choose_channels_last(config, network, precision) == found
