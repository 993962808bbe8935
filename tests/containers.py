"""The images of a folder in other containers: tars and Arrow tables, in the same order."""

import io
import tarfile
from pathlib import Path

SPLITS = {"train": "train", "val": "validation"}


def samples_of(root: Path, split: str) -> list[tuple[str, bytes, str]]:
    """(name, content, class) of each image of root/split, in the order of the paths."""
    paths = sorted(path for path in (root / split).rglob("*") if path.is_file())
    return [(path.name, path.read_bytes(), path.parent.name) for path in paths]


def as_tars(root: Path, into: Path, per_shard: int = 3) -> Path:
    """into/train/00000.tar, ...: samples `000000.png` and `000000.cls`."""
    for split in SPLITS:
        (into / split).mkdir(parents=True)
        samples = samples_of(root, split)
        for start in range(0, len(samples), per_shard):
            members = {}
            for number, (name, content, label) in enumerate(samples[start : start + per_shard], start):
                suffix = Path(name).suffix
                members |= {f"{number:06d}{suffix}": content, f"{number:06d}.cls": label.encode()}
            write_tar(into / split / f"{start // per_shard:05d}.tar", members)
    return into


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def as_tables(root: Path, into: Path) -> Path:
    """A DatasetDict on the disk, its classes a ClassLabel."""
    import datasets

    classes = sorted({label for _, _, label in samples_of(root, "train")})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=classes)})
    splits = {}
    for split, name in SPLITS.items():
        samples = samples_of(root, split)
        columns = {
            "image": [{"bytes": content, "path": None} for _, content, _ in samples],
            "label": [label for _, _, label in samples],
        }
        splits[name] = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict(splits).save_to_disk(str(into))
    return into
