from pathlib import Path

import pytest

from trainer.facts import processor_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: Xeon(R): 8488C\nprocessor\t: 1\nmodel name\t: other\n", "Xeon(R): 8488C"),
        ("CPU implementer : 0x41\n", "of Python"),
        (None, "of Python"),
    ],
)
def test_the_processors_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, name: str) -> None:
    monkeypatch.setattr("platform.processor", lambda: "of Python")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert processor_name(tmp_path / "cpuinfo") == name
