"""Each recipe makes its first steps, with everything of it but the size: of the network, the images and the batch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.loader import load_config
from tests.dist.harness import finished
from tests.folders import noisy

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = {
    "resnet50_v2": ["model.name=resnet18", "data.image_size=24"],
    "vit_b_16": ["model.name=timm/vit_tiny_patch16_224", "model.args.img_size=32", "data.image_size=32"],
    "resnet50_a1": ["model.name=timm/resnet18", "data.image_size=32"],
    "resnet50_a2": ["model.name=timm/resnet18", "data.image_size=32"],
    "resnet50_a3": ["model.name=timm/resnet18", "data.image_size=24"],
    "finetune": ["model.name=resnet18", "model.weights=none", "data.image_size=32"],
}
ON_CIFAR = {
    "cifar10_94": ["model.args={widths: [8, 8, 8]}"],
    "cifar10_96": ["model.args={widths: [8, 8, 8], depth: 3}"],
}
SMALL = (
    "max_epochs=null",
    "max_steps=3",
    "global_batch_size=8",
    "device=cpu",
    "data.num_workers=1",
    "eval.batch_size=4",
)


class Coloured:
    """Sixteen images of CIFAR-10's size, of three classes."""

    classes = ("a", "b", "c")

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (3, 32, 32), generator=generator, dtype=torch.uint8), index % 3


def coloured(train: bool) -> Coloured:
    return Coloured()


@pytest.mark.parametrize("name", ON_CIFAR)
def test_a_recipe_for_cifar_trains(tmp_path: Path, name: str) -> None:
    overrides = ["data.name=tests.dist.test_recipes:coloured", *SMALL, *ON_CIFAR[name], "schedule.warmup_epochs=0.5"]
    config = load_config(CONFIGS / f"{name}.yaml", overrides).config
    attempt = finished(tmp_path / "run", config, 2)
    assert attempt.result()["step"] == 3
    assert attempt.metric("eval/loss")[-1][0] == 3
    log = attempt.log()
    assert "weights    begin with the first 16 training images" in log
    assert "lr         norms and biases at 64 times it" in log
    assert "with flips and shifts" in log
    own = attempt.checkpoint()
    before = own.shared["model"]["whitening.conv.weight"]
    more = config.model_copy(update={"max_steps": 5})
    again = finished(tmp_path / "run", more, 1, allow_changes=True)
    assert torch.equal(again.checkpoint().shared["model"]["whitening.conv.weight"], before)
    assert "begin with the first" not in again.log()


class Random(Coloured):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(index)
        return image.roll(int(torch.randint(32, ())), 1), label


def randomly(train: bool) -> Random:
    return Random()


def test_all_ranks_begin_with_the_same_images_though_they_are_drawn(tmp_path: Path) -> None:
    overrides = [*SMALL, *ON_CIFAR["cifar10_94"], "schedule.warmup_epochs=0.5"]
    config = load_config(CONFIGS / "cifar10_94.yaml", overrides).config
    config = config.model_copy(update={"data": config.data.model_copy(update={"name": f"{__name__}:randomly"})})
    states = [finished(tmp_path / f"on-{world_size}", config, world_size).export() for world_size in (1, 2)]
    name = "whitening.conv.weight"
    assert torch.equal(states[0][name], states[1][name])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(tmp_path: Path, name: str) -> None:
    if any("timm" in setting for setting in RECIPES[name]):
        pytest.importorskip("timm")
    noisy(tmp_path / "images", train__a=8, train__b=8, val__a=3, val__b=2)
    sizes = ["data.resize_size=36"] + (["data.eval_image_size=32"] if name not in ("vit_b_16", "finetune") else [])
    overrides = [f"data.root={tmp_path}/images", *SMALL, *RECIPES[name], *sizes, "schedule.warmup_epochs=0.5"]
    config = load_config(CONFIGS / f"{name}.yaml", overrides).config
    attempt = finished(tmp_path / "run", config, 2)
    assert attempt.result()["step"] == 3
    assert attempt.metric("eval/loss")[-1][0] == 3
    assert attempt.outcome().status == "done"
