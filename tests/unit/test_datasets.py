from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from configs.data_section import DataConfig
from configs.errors import ConfigError, EnvironmentProblem, TrainingError
from trainer.data.datasets import TensorSplit, as_image_tensor, known_labels, load_callable, load_data
from trainer.data.source import build_source, choose_residency, materialise
from trainer.data.stream import KeyedSamples, class_of
from trainer.data.workers import Request

CPU = torch.device("cpu")


class Listed:
    """(image, label) pairs; `classes` where they are given."""

    def __init__(self, images: list[Any], classes: list[str] | None = None) -> None:
        self.images = images
        if classes is not None:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index], index % 2


def byte_image(value: int, height: int = 2, width: int = 3) -> Tensor:
    return torch.full((1, height, width), value, dtype=torch.uint8)


def two_classes(train: bool) -> Listed:
    return Listed([byte_image(i) for i in range(4 if train else 2)], ["cat", "dog"])


def no_classes(train: bool) -> Listed:
    return Listed([byte_image(i) for i in range(4)])


def empty_eval(train: bool) -> Listed:
    return Listed([byte_image(1)] if train else [])


def iterable_only(train: bool) -> Any:
    return iter(range(3))


def data(name: str, **more: Any) -> DataConfig:
    return DataConfig(name=f"{__name__}:{name}", **more)


@pytest.mark.parametrize(
    "build",
    [
        lambda pixels: Image.fromarray(pixels),
        lambda pixels: pixels,
        lambda pixels: pixels[:, :, None],
        lambda pixels: torch.from_numpy(pixels),
        lambda pixels: torch.from_numpy(pixels)[None],
    ],
    ids=["PIL", "HW array", "HWC array", "HW tensor", "CHW tensor"],
)
def test_grey_images_become_the_same_tensor(build: Callable[[Any], Any]) -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    found = as_image_tensor(build(pixels))
    assert found.dtype == torch.uint8
    assert torch.equal(found, torch.arange(12, dtype=torch.uint8).view(1, 3, 4))


def test_colour_images_become_channels_first() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    expected = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    assert torch.equal(as_image_tensor(pixels), expected)
    assert torch.equal(as_image_tensor(Image.fromarray(pixels)), expected)


def test_own_data_set_with_its_classes() -> None:
    loaded = load_data(data("two_classes", mean=(0.5,), std=(0.25,)))
    assert (len(loaded.train), len(loaded.evaluation)) == (4, 2)
    assert (loaded.num_classes, loaded.classes, loaded.mean, loaded.std) == (2, ("cat", "dog"), (0.5,), (0.25,))


def test_own_data_set_with_a_number_of_classes() -> None:
    loaded = load_data(data("no_classes", num_classes=7))
    assert (loaded.num_classes, loaded.classes, loaded.mean) == (7, None, None)


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        ("no_classes", {}, r"data.num_classes is not set and .*no_classes has no `classes`"),
        ("two_classes", {"num_classes": 3}, r"data.num_classes is 3 but .*two_classes has 2 classes"),
        ("empty_eval", {"num_classes": 2}, r"gave an empty eval split: 0 samples"),
        ("iterable_only", {"num_classes": 2}, r"gave a .*iterator for train; wanted is a map-style data set"),
        ("nowhere", {}, r"data.name: module .* has no 'nowhere'"),
        ("CPU", {}, r"data.name: .*:CPU is a device, not callable"),
    ],
)
def test_what_cannot_be_loaded_is_told(name: str, more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_data(data(name, **more))


def test_missing_module_is_told_but_a_missing_import_inside_it_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_731.py").write_text("import no_such_library_731\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no module 'absent_731'"):
        load_callable("absent_731:x", "data.name")
    with pytest.raises(ModuleNotFoundError, match="no_such_library_731"):
        load_callable("broken_731:x", "data.name")


def test_materialised_split_holds_every_sample_once() -> None:
    split = materialise(Listed([byte_image(i) for i in range(5)]), 0, 10)
    assert split.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert split.labels.tolist() == [0, 1, 0, 1, 0]
    assert split.labels.dtype == torch.int64
    assert split.num_bytes == 5 * 6 + 5 * 8
    assert materialise(split, 0, 10) is split


@pytest.mark.parametrize(
    "odd",
    [byte_image(1, 2, 4), torch.zeros(1, 2, 3), torch.zeros(3, 2, 3, dtype=torch.uint8)],
    ids=["wide", "float", "colour"],
)
def test_images_that_do_not_fit_one_array_are_told_with_the_first(odd: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"sample 2 is torch\.\w+ .* use data.residency: stream"):
        materialise(Listed([byte_image(0), byte_image(1), odd, odd]), 0, 10)


def tensors(size: int) -> TensorSplit:
    return TensorSplit(torch.zeros(size, 1, 2, 3, dtype=torch.uint8), torch.zeros(size, dtype=torch.int64))


@pytest.mark.parametrize(
    ("residency", "split", "free", "chosen"),
    [
        ("auto", tensors(10), 10**9, "device"),
        ("auto", tensors(10), 4 * 280, "device"),
        ("auto", tensors(10), 4 * 280 - 1, "stream"),
        ("auto", Listed([]), 10**9, "stream"),
        ("device", Listed([]), 10**9, "device"),
        ("device", tensors(10), 280, "device"),
        ("stream", tensors(10), 10**9, "stream"),
    ],
)
def test_residency(monkeypatch: pytest.MonkeyPatch, residency: str, split: Any, free: int, chosen: str) -> None:
    # Ten samples of 6 bytes and an 8-byte label in each split: 280 bytes; a quarter of what is free may be taken.
    monkeypatch.setattr("trainer.data.source.free_bytes", lambda device, ranks: free)
    config = DataConfig(residency=residency)  # type: ignore[arg-type]
    found, reason = choose_residency(config, (split, split), CPU, 1, 2)
    assert found == chosen
    assert reason


def test_data_that_does_not_fit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.source.free_bytes", lambda device, ranks: 279)
    with pytest.raises(EnvironmentProblem, match=r"needs 280 bytes on cpu and 279 are free"):
        choose_residency(DataConfig(residency="device"), (tensors(10), tensors(10)), CPU, 1, 2)


def test_both_sources_give_the_same_evaluation_batches() -> None:
    split = two_classes(train=True)
    batches = [range(0, 3), range(3, 4)]
    found = []
    for residency in ("device", "stream"):
        source = build_source(split, residency, 0, 0, 10, CPU)
        assert len(source) == 4
        found.append([(images.tolist(), labels.tolist()) for images, labels in source.evaluation(batches)])
    assert found[0] == found[1]
    assert [labels for _, labels in found[0]] == [[0, 1, 0], [1]]


@pytest.mark.parametrize("label", [-100, -1, 3, 1.5, float("nan"), "cat", None])
def test_a_label_that_is_no_class_is_told_with_its_sample(label: object) -> None:
    with pytest.raises(TrainingError, match=r"the label of sample 7 is .*, not a class from 0 to 2"):
        class_of(label, 3, 7)


@pytest.mark.parametrize("label", [2, 2.0, torch.tensor(2), np.int64(2)], ids=repr)
def test_a_class_is_one_in_any_type(label: object) -> None:
    assert class_of(label, 3, 0) == 2


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([0, 1], "are torch.int64 of shape (2,)"),
        ([0.0, 1.0, 0.0], "are torch.float32 of shape (3,)"),
        ([[0], [1], [0]], "are torch.int64 of shape (3, 1)"),
        (["cat", "dog", "cat"], "are no tensor of integers"),
        ([0, 2, 1], "sample 1 of mine has the label 2"),
        ([0, 1, -1], "sample 2 of mine has the label -1"),
    ],
)
def test_labels_that_are_no_classes_are_told(targets: Any, said: str) -> None:
    split = Listed([byte_image(0)] * 3)
    split.targets = targets  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as caught:
        known_labels(split, 2, "mine")
    assert said in str(caught.value)
    assert str(caught.value).endswith("wanted is a class for each of the 3 samples, an integer from 0 to 1")


@pytest.mark.parametrize("targets", [[0, 1, 1], np.array([0, 1, 1], dtype=np.uint8), torch.tensor([0, 1, 1])])
def test_labels_may_be_of_any_integer_type(targets: Any) -> None:
    split = Listed([byte_image(0)] * 3)
    split.targets = targets  # type: ignore[attr-defined]
    found = known_labels(split, 2, "mine")
    assert found is not None
    assert (found.dtype, found.tolist()) == (torch.int64, [0, 1, 1])


def arrays(train: bool) -> TensorSplit:
    return TensorSplit(torch.zeros(2, 1, 2, 3, dtype=torch.uint8), torch.tensor([0, 2 if train else 1]))


def test_labels_of_arrays_are_looked_at_when_they_are_loaded() -> None:
    with pytest.raises(ConfigError, match=r"sample 1 of .*:arrays has the label 2"):
        load_data(data("arrays", num_classes=2))
    assert load_data(data("arrays", num_classes=3)).num_classes == 3


def test_a_batch_of_arrays_that_are_not_resident_is_that_of_their_samples() -> None:
    split = TensorSplit(torch.arange(30, dtype=torch.uint8).view(5, 1, 2, 3), torch.tensor([0, 1, 2, 1, 0]))
    images, labels = KeyedSamples(split, 0, 3).read(Request(1, [4, 0, 7]))
    assert torch.equal(images, split.images[[4, 0, 2]])
    assert labels.tolist() == [0, 0, 2]
