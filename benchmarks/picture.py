"""The ratios of a table as a bar chart: one SVG, no library. Pure: rows in, text out."""

import math
from collections.abc import Sequence
from html import escape

from benchmarks.harness import Row, Spread

WIDTH, LINE, TOP, BOTTOM = 900, 26, 54, 34
LEFT, RIGHT = 250, 130  # of the bars: names before them, numbers behind
COLOURS = {True: "#2e8b57", False: "#b03a2e", None: "#7d8fa3"}
TICKS = (1, 2, 5)
MARGIN = 1.1  # of the axis beyond the farthest bar, as a factor


def draw(rows: Sequence[Row], title: str) -> str:
    """A line for each row that has a ratio: a bar from 1 to the median on a logarithmic axis, a thin line over the
    quartiles, a black mark at the target; green where that was met, red where not, grey where there is none."""
    shown = [row for row in rows if "ratio" in row.details]
    low, high = limits([value for row in shown for value in values_of(row)])
    height = TOP + LINE * len(shown) + BOTTOM
    size = f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="13"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect width="100%" height="100%" fill="white"/>']
    parts += [f'<text x="10" y="20" font-weight="bold">{escape(title)}</text>']
    parts += ['<text x="10" y="40">ratio of the one measured to the one it is compared with</text>']
    parts += axis(low, high, height - BOTTOM)
    for number, row in enumerate(shown):
        parts += bar(row, TOP + LINE * number, low, high)
    return "\n".join([*parts, "</svg>\n"])


def values_of(row: Row) -> list[float]:
    """Every ratio that a row shows."""
    ratio = Spread(**row.details["ratio"])
    target = row.details["target"]
    return [ratio.low, ratio.median, ratio.high, *([] if target is None else [target])]


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Ends of the axis; 1, where the bars begin, is on it."""
    return min([1.0, *values]) / MARGIN, max([1.0, *values]) * MARGIN


def place(value: float, low: float, high: float) -> float:
    """x of a ratio."""
    return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low) / math.log(high / low)


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten on the axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in TICKS if low <= step * 10.0**power <= high]


def axis(low: float, high: float, bottom: float) -> list[str]:
    parts = []
    for tick in ticks(low, high):
        x, colour = place(tick, low, high), "#444" if tick == 1 else "#ddd"
        parts.append(f'<path d="M{x:.1f},{TOP - 6} V{bottom + 4}" stroke="{colour}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{tick:g}</text>')
    return parts


def bar(row: Row, top: float, low: float, high: float) -> list[str]:
    ratio, target, colour = Spread(**row.details["ratio"]), row.details["target"], COLOURS[row.is_met]
    start, end = sorted((place(1.0, low, high), place(ratio.median, low, high)))
    middle = top + LINE / 2
    quartiles = f"M{place(ratio.low, low, high):.1f},{middle} H{place(ratio.high, low, high):.1f}"
    parts = [
        f'<text x="{LEFT - 10}" y="{middle + 5}" text-anchor="end">{escape(row.key)}</text>',
        f'<rect x="{start:.1f}" y="{top + 5}" width="{end - start:.1f}" height="{LINE - 10}" fill="{colour}"/>',
        f'<path d="{quartiles}" stroke="#222" stroke-width="1.5"/>',
        f'<text x="{WIDTH - RIGHT + 10}" y="{middle + 5}">{escape(numbers(row, ratio.median))}</text>',
    ]
    if target is not None:
        line = f"M{place(target, low, high):.1f},{top + 2} v{LINE - 4}"
        parts.append(f'<path d="{line}" stroke="#000" stroke-width="3"/>')
    return parts


def numbers(row: Row, median: float) -> str:
    """The median, and the target where it is one for the ratio."""
    return f"{median:.3g}" + (f" ({row.target})" if row.details["target"] is not None else "")
