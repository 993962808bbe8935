"""A folder of images by the real command line: checked, trained from, and what is wrong with it told."""


from tests.e2e.commands import Place, needs_proc
from tests.folders import make, plain

pytestmark = needs_proc

CONFIG = """\
max_epochs: 2
global_batch_size: 8
mixed_precision: no
device: cpu
data:
  name: imagefolder
  root: images
model:
  name: mlp
optim:
  lr: 0.1
  momentum: 0.9
launch:
  num_threads: 1
"""


def write_config(here: Place) -> None:
    (here.folder / "folder.yaml").write_text(CONFIG, encoding="utf-8")


def test_check_data_tells_by_its_exit_code_and_leaves_a_picture_alone(here: Place) -> None:
    write_config(here)
    make(here.folder / "images", train__a=2, train__b=2)
    plain(here.folder / "images/val/a/0.png", (1, 2, 3))
    before = set(here.folder.iterdir())
    command = here.run("check-data", "folder.yaml", "data.image_size=8", "device=cuda", "--out", "pictures")
    assert command.lines[-1] == "checked    5 images: all is well"
    assert [path.name for path in (here.folder / "pictures").iterdir()] == ["folder-samples.png"]
    (here.folder / "images/val/a/0.png").write_bytes(b"")
    command = here.run("check-data", "folder.yaml", code=1)
    assert f"broken     {here.folder}/images/val/a/0.png: it is empty" in command.lines
    new = {path.name for path in set(here.folder.iterdir()) - before}
    assert new == {"pictures", "folder-samples.png", "console-0.txt", "console-1.txt"}
    assert list(here.temporary.iterdir()) == []


def test_what_check_data_cannot_check_is_one_line(here: Place) -> None:
    write_config(here)
    (line,) = here.run("check-data", "folder.yaml", code=2).lines
    assert line.startswith(f"config error: data.root: there is no folder {here.folder}/images; ")
    (line,) = here.run("check-data", "tiny.yaml", code=2).lines
    assert line == ("config error: check-data is for data.name: imagefolder, and tiny.yaml has tests.dist.toys:images")
