"""Draw the training loss of two runs and its difference:

python -m benchmarks.curves runs/ONE runs/OTHER docs/bitwise.svg
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 720, 220, 50
Points = dict[int, float]


def losses(run: Path) -> Points:
    """train/loss by step."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def panel(top: int, title: str, curves: Sequence[tuple[str, Points]], low: float, high: float) -> list[str]:
    """One diagram of curves, the x axis by step."""
    last = max(max(points) for _, points in curves)

    def place(step: int, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / last
        return f"{x:.1f},{top + HEIGHT - 30 - (HEIGHT - 60) * (value - low) / (high - low):.1f}"

    bottom, right = top + HEIGHT - 30, WIDTH - MARGIN
    parts = [f'<text x="{MARGIN}" y="{top + 18}">{title}</text>']
    parts += [f'<path d="M{MARGIN},{top + 30} V{bottom} H{right}" fill="none" stroke="#888"/>']
    parts += [f'<text x="4" y="{top + 36}">{high:g}</text><text x="4" y="{bottom}">{low:g}</text>']
    parts += [f'<text x="{right}" y="{bottom + 16}" text-anchor="end">step {last}</text>']
    for style, points in curves:
        path = " ".join(place(step, value) for step, value in points.items())
        parts.append(f'<polyline points="{path}" fill="none" {style}/>')
    return parts


def main(one: Path, other: Path, picture: Path) -> None:
    left, right = losses(one), losses(other)
    assert left.keys() == right.keys(), "the runs have other log points"
    difference = {step: left[step] - right[step] for step in left}
    worst = max(abs(value) for value in difference.values())
    wide, dashed = 'stroke="#7db3e8" stroke-width="6"', 'stroke="#b03a2e" stroke-width="2" stroke-dasharray="6 4"'
    title = f"train/loss of {one.name} (wide) and {other.name} (dashed)"
    parts = panel(0, title, [(wide, left), (dashed, right)], 0, 2.5)
    span = worst or 1e-16
    parts += panel(HEIGHT, f"their difference, at most {worst:g}", [(dashed, difference)], -span, span)
    size = f'width="{WIDTH}" height="{2 * HEIGHT}" font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect width="100%" height="100%" fill="white"/>'
    picture.write_text("\n".join([head, *parts, "</svg>\n"]), encoding="utf-8")
    print(f"{len(left)} points, largest difference {worst:g}: {picture}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
