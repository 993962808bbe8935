"""Published weights through the real command: fetched by a helper before any rank starts, or told why not."""

import hashlib
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.commands import Place, needs_proc

pytestmark = needs_proc

TIMM = "mobilenetv3_small_050"


def put_into_cache(home: Path) -> None:
    """What the hub's cache looks like with the weights of TIMM in it."""
    timm = pytest.importorskip("timm")
    place = home / "hub" / f"models--timm--{TIMM}.lamb_in1k"
    for folder in ("blobs", "refs", "snapshots/1234"):
        (place / folder).mkdir(parents=True)
    save_file(dict(timm.create_model(TIMM).state_dict()), place / "new")
    blob = place / "blobs" / hashlib.sha256((place / "new").read_bytes()).hexdigest()
    (place / "new").rename(blob)
    (place / "refs" / "main").write_text("1234")
    (place / "snapshots" / "1234" / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")


def test_weights_of_timm_are_trained_on_by_two_ranks(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(here.folder))  # importing timm would set it
    put_into_cache(here.folder / "home")
    model = (f"model.name=timm/{TIMM}", "model.args={}", "model.weights=default", "model.freeze_except=[classifier]")
    offline = {"HF_HOME": str(here.folder / "home"), "HF_HUB_OFFLINE": "1"}
    command = here.run("train", "tiny.yaml", *model, "max_epochs=1", "--nproc", "2", "--run-name", "net", **offline)
    assert "weights    lamb_in1k of timm, " in command.output
    assert "new, from seed 0: classifier.weight, classifier.bias (4 classes, it has 1,000)" in command.output
    state = load_file(here.run_dir("net").weights)
    (cached,) = (here.folder / "home").glob("hub/*/blobs/*")
    before = load_file(cached)
    assert all((state[name] == before[name]).all() for name in state if "bn1.running_mean" in name)
    # Going on needs the cache no more.
    more = here.run("resume", "net", "max_epochs=2", "--allow-changes", HF_HOME=str(here.folder), HF_HUB_OFFLINE="1")
    assert "resume     step_00000008" in more.output


def test_weights_that_cannot_be_fetched_end_the_command_before_any_rank(here: Place) -> None:
    no_network = {"TORCH_HOME": str(here.folder / "home"), "https_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    model = ("model.name=resnet18", "model.args={}", "model.weights=default")
    command = here.run("train", "tiny.yaml", *model, "--nproc", "2", "--run-name", "net", code=3, **no_network)
    start = "environment error: model.weights: IMAGENET1K_V1 of torchvision for resnet18 could not be downloaded from "
    assert command.lines[-1].startswith(f"{start}https://download.pytorch.org/models/resnet18-f37072fd.pth: ")
    assert "Traceback" not in command.output
    assert not list(here.attempt("net").path.glob("outcome-*"))
    assert [path.name for path in (here.folder / "home").rglob("*") if path.is_file()] == [".lockstep.lock"]


def test_a_path_that_is_not_there_starts_nothing(here: Place) -> None:
    command = here.run("train", "tiny.yaml", "model.weights=runs/other", code=2)
    assert command.lines == ["config error: model.weights: runs/other does not exist"]
    assert not (here.folder / "runs").exists()
