"""Small line charts as SVG text: logarithmic or plain axes, names at the ends of lines,
colors for light and dark pages.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 62, 200, 40, 46
CHARACTER, LINE = 6.1, 14

STYLE = """<style>
.page { fill: #ffffff } text { fill: #24292f; font: 11px sans-serif }
.title { font-size: 13px; font-weight: bold }
.grid { stroke: #d8dee4; stroke-width: 1 } .ours { stroke: #1f6feb; fill: none }
.published { stroke: #bc6c00; fill: none }
.seen { stroke: #1a7f37; fill: none } .other { stroke: #8250df; fill: none }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d } .ours { stroke: #58a6ff }
.published { stroke: #e3a04f }
.seen { stroke: #3fb950 } .other { stroke: #bc8cff } }
</style>"""


@dataclass(frozen=True)
class Line:
    """A curve. kind: ours or other (proved here), published (somebody else's bound),
    seen (found by a search, from below).
    """

    name: str
    points: list[tuple[float, float]]
    kind: str = "ours"


@dataclass(frozen=True)
class Axis:
    """A direction of the chart: what it counts, and from where to where."""

    name: str
    low: float
    high: float
    logarithmic: bool = True

    def share(self, value: float) -> float:
        """Where a value is, from 0 to 1."""
        low, high, value = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round numbers between the ends: powers of ten, with 2 and 5 where there are few; or steps of 1,
        2 or 5.
        """
        if not self.logarithmic:
            return _steps(self.low, self.high)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits = (1, 2, 5) if self.high < 300 * self.low else (1,)
        every = 1 + len(powers) // 8
        found = [digit * 10.0**power for power in powers if power % every == 0 for digit in digits]
        return [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]


def axis(name: str, values: list[float], logarithmic: bool = True) -> Axis:
    """An axis that holds all values."""
    low, high = min(values), max(values)
    return Axis(name, low, high) if logarithmic else Axis(name, min(0.0, low), high, False)


def chart(
    title: str,
    across: str,
    lines: list[Line],
    *,
    above: str = "",
    logarithmic: tuple[bool, bool] = (True, True),
) -> str:
    """The chart of all lines; `above` names what goes up, `logarithmic` says which axes are (across, up)."""
    x = axis(across, [point[0] for line in lines for point in line.points], logarithmic[0])
    y = axis(above, [point[1] for line in lines for point in line.points], logarithmic[1])
    frame = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
        f'height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">'
    )
    heading = f'<text class="title" x="{LEFT}" y="20">{html.escape(title)}</text>'
    parts = [frame, STYLE, '<rect class="page" width="100%" height="100%"/>', heading, *_grid(x, y)]
    parts += [_dot(line, x, y) if len(line.points) == 1 else _curve(line, x, y) for line in lines]
    parts += _names([line for line in lines if len(line.points) > 1], y)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _steps(low: float, high: float) -> list[float]:
    raw = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _across(x: Axis, value: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * x.share(value)


def _up(y: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y.share(value)


def _grid(x: Axis, y: Axis) -> list[str]:
    floor, end = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in x.ticks():
        at = f"{_across(x, tick):.1f}"
        parts.append(f'<line class="grid" x1="{at}" y1="{TOP}" x2="{at}" y2="{floor}"/>')
        parts.append(f'<text x="{at}" y="{floor + 15}" text-anchor="middle">{tick:.5g}</text>')
    for tick in y.ticks():
        at = _up(y, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{end}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:.5g}</text>')
    parts.append(
        f'<text x="{(LEFT + end) / 2:.0f}" y="{floor + 34}" text-anchor="middle">{html.escape(x.name)}</text>'
    )
    middle = (TOP + floor) / 2
    parts.append(
        f'<text transform="translate(14,{middle:.0f}) rotate(-90)" '
        f'text-anchor="middle">{html.escape(y.name)}</text>'
    )
    return parts


def _curve(line: Line, x: Axis, y: Axis) -> str:
    """Proofs are lines, published ones dashed; what was seen is a line with dots."""
    at = [(_across(x, a), _up(y, b)) for a, b in line.points]
    dashes = ' stroke-dasharray="6 4"' if line.kind == "published" else ""
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
    dots = (
        [f'<circle class="{line.kind}" cx="{a:.1f}" cy="{b:.1f}" r="2"/>' for a, b in at]
        if line.kind == "seen"
        else []
    )
    return "\n".join([f'<polyline class="{line.kind}" stroke-width="1.8"{dashes} points="{path}"/>', *dots])


def _dot(line: Line, x: Axis, y: Axis) -> str:
    """One point alone, with its name beside it."""
    a, b = _across(x, line.points[0][0]), _up(y, line.points[0][1])
    circle = f'<circle class="{line.kind}" stroke-width="2" cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>'
    return f'{circle}\n<text x="{a + 9:.1f}" y="{b + 4:.1f}">{html.escape(line.name)}</text>'


def _names(lines: list[Line], y: Axis) -> list[str]:
    """The names at the right, next to the ends of their lines and never over each other."""
    order = sorted(lines, key=lambda line: -y.share(line.points[-1][1]))
    wrapped = [(line, _wrapped(line.name)) for line in order]
    parts, free, left = [], TOP - 4.0, sum(LINE * len(texts) + 4 for _, texts in wrapped)
    for line, texts in wrapped:
        place = min(max(_up(y, line.points[-1][1]) - LINE * len(texts) / 2, free), HEIGHT - 6 - left)
        place = max(place, free)
        start = WIDTH - RIGHT + 8
        mark = place + LINE * 0.7
        parts.append(
            f'<line class="{line.kind}" stroke-width="3" x1="{start}" y1="{mark:.1f}" x2="{start + 12}" '
            f'y2="{mark:.1f}"/>'
        )
        for k, text in enumerate(texts):
            parts.append(
                f'<text x="{start + 17}" y="{place + LINE * (k + 1) - 2:.1f}">{html.escape(text)}</text>'
            )
        free, left = place + LINE * len(texts) + 4, left - LINE * len(texts) - 4
    return parts


def _wrapped(text: str) -> list[str]:
    room = int((RIGHT - 28) / CHARACTER)
    lines = [""]
    for word in text.split():
        fits = len(lines[-1]) + len(word) < room
        lines = [*lines[:-1], f"{lines[-1]} {word}".strip()] if fits else [*lines, word]
    return lines
