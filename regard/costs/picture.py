"""Attention against weights over the length of a sequence: as lines of text, as an SVG,
and as a page that needs nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from regard._pages import source_hash
from regard._printable import printable
from regard.costs.account import FEED_FORWARD, Cost
from regard.costs.wording import COLUMNS, count, remarks, rows

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 30, 60
"""The margins of the plot; labels of lines stand on the right."""
BAR = 40
"""Signs of a bar of text."""
STYLE = """
svg { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Helvetica, Arial,
  sans-serif; }
svg { --paper: #fbfaf7; --ink: #1c1d21; --soft: #5a5e68; --line: #e1ded6; --accent: #a63c08; --high: #0a3154;
  }
@media (prefers-color-scheme: dark) {
  svg { --paper: #14161a; --ink: #e9e8e4; --soft: #a6abb5; --line: #30353e; --accent: #ff9f68;
    --high: #86b7e0; }
}
.paper { fill: var(--paper); } .grid { stroke: var(--line); }
.axis { fill: var(--soft); paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
.name { fill: var(--ink); font-weight: 600; }
.pairs { stroke: var(--accent); } .weights { stroke: var(--high); } .line { fill: none; stroke-width: 2.5; }
.masked { stroke-dasharray: 7 5; } .thin { stroke-width: 1.5; stroke-dasharray: 2 4; }
.mark { stroke: var(--soft); stroke-dasharray: 3 4; }
text.pairs { fill: var(--accent); stroke: none; } text.weights { fill: var(--high); stroke: none; }
"""
PAGE = """
body { margin: 0 auto; max-width: 60rem; padding: 2rem; background: #fbfaf7; color: #1c1d21;
  font: 1rem/1.6 system-ui, sans-serif; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem .8rem; text-align: right; }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
tr { border-bottom: 1px solid #e1ded6; } svg { width: 100%; height: auto; }
tr:last-child { font-weight: 600; } h1 { font-size: 1.6rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
@media (prefers-color-scheme: dark) { body { background: #14161a; color: #e9e8e4; }
  tr { border-color: #30353e; } }
"""


@dataclass(frozen=True)
class Curve:
    """Flops of one token at each length: slope 1 where pairs are counted, slope 0 where weights are."""

    label: str
    style: str
    at_one: float
    slope: int

    def at(self, length: float) -> float:
        """Flops of a token of a sequence of that length."""
        return self.at_one * length**self.slope


def curves(cost: Cost) -> list[Curve]:
    """Pairs, pairs where the masked half is skipped, the weights of the layers,
    and feed-forward among them.
    """
    tokens = cost.sizes.total
    growing = int(cost.square)
    pairs = cost.attention / tokens / cost.sizes.tokens**growing
    found = [
        Curve("pairs, all", "pairs", pairs, growing),
        Curve("pairs, causal half", "pairs masked", pairs / 2, growing),
        Curve("weights of layers", "weights", cost.linear / tokens, 0),
        Curve("feed-forward", "weights thin", cost.part(FEED_FORWARD).matmul / tokens, 0),
    ]
    return [curve for curve in found if curve.at_one > 0]


def lengths(cost: Cost) -> list[int]:
    """Powers of two around the crossover and the length that was asked for."""
    around = [
        float(cost.sizes.tokens),
        *(value for value in (cost.crossover, cost.causal_crossover) if value and value >= 1),
    ]
    low, high = math.floor(math.log2(min(around))) - 2, math.ceil(math.log2(max(around))) + 2
    return [2**power for power in range(max(low, 0), high + 1)]


def bars(cost: Cost) -> list[str]:
    """A bar for each length: the share of pairs, all of them counted, in the products of the layers."""
    found = [
        f"{'tokens':>10}  share of attention (scores and mixing) in the products "
        "of the layers, all pairs counted"
    ]
    for length in lengths(cost):
        pairs = cost.attention * (length / cost.sizes.tokens) ** (2 if cost.square else 1)
        weights = cost.linear * length / cost.sizes.tokens
        share = pairs / (pairs + weights) if pairs + weights else 0.0
        filled = round(BAR * share)
        found.append(f"{length:>10,}  {'█' * filled}{'░' * (BAR - filled)} {100 * share:5.1f} %")
    return found


def svg(cost: Cost, title: str) -> str:
    """The picture, by itself."""
    title = printable(title)
    lines, xs = curves(cost), lengths(cost)
    values = [curve.at(x) for curve in lines for x in (xs[0], xs[-1])] or [1.0]
    plot = _Plot(
        xs[0],
        xs[-1],
        10.0 ** math.floor(math.log10(min(values))),
        10.0 ** math.ceil(math.log10(max(values) * 1.01)),
    )
    body = [*_grid(plot, xs), *_marks(plot, cost), *_lines(plot, lines)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}">'
    )
    name = f"<title>{escape(title)}</title><style>{STYLE}</style>"
    return "\n".join(
        [head, name, f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>', *body, "</svg>\n"]
    )


def page(cost: Cost, title: str, notes: Sequence[str] = ()) -> str:
    """The table, the sentences below it and the picture, as one file that loads nothing from the network.

    notes: sentences to print before those about the numbers.
    """
    title = printable(title)
    header = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(cost)
    )
    said = "".join(f"<li>{escape(printable(remark))}</li>" for remark in (*notes, *remarks(cost)))
    styles = f"{source_hash(PAGE)} {source_hash(STYLE)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src {styles}; base-uri 'none'; form-action 'none'\">"
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        f"<style>{PAGE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n"
        f'<div class="scroll"><table><tr>{header}</tr>{body}</table></div>\n<ul>{said}</ul>\n'
        f"{svg(cost, title)}</body></html>\n"
    )


@dataclass(frozen=True)
class _Plot:
    """Logarithmic axes."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / self.x_low) / math.log(
            self.x_high / self.x_low
        )

    def y(self, value: float) -> float:
        return (
            HEIGHT
            - BOTTOM
            - (HEIGHT - TOP - BOTTOM) * math.log(value / self.y_low) / math.log(self.y_high / self.y_low)
        )


def _grid(plot: _Plot, xs: Sequence[int]) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    powers = range(round(math.log10(plot.y_low)), round(math.log10(plot.y_high)) + 1)
    found = [
        f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{plot.y(10.0**p):.1f}" y2="{plot.y(10.0**p):.1f}"/>'
        for p in powers
    ]
    found += [
        _text(
            LEFT - 8, plot.y(10.0**p) + 4, count(10.0**p).replace(".00", "").replace(".0", ""), "axis", "end"
        )
        for p in powers
    ]
    step = math.ceil(len(xs) / 8)
    found += [_text(plot.x(x), bottom + 20, _short(x), "axis", "middle") for x in xs[::step]]
    found.append(_text((LEFT + right) / 2, HEIGHT - 14, "tokens of a sequence", "axis", "middle"))
    return [*found, _text(12, 18, "flops of matrix products for one token, forward", "axis", "start")]


def _lines(plot: _Plot, curves: Sequence[Curve]) -> list[str]:
    """Each line with its name beside its end; names that would touch move apart."""
    found: list[str] = []
    taken: list[float] = []
    for curve in sorted(curves, key=lambda one: plot.y(one.at(plot.x_high))):
        y1, y2 = (plot.y(curve.at(x)) for x in (plot.x_low, plot.x_high))
        found.append(
            f'<line class="line {curve.style}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y1:.1f}" y2="{y2:.1f}"/>'
        )
        at = max([y2, *(other + 18 for other in taken[-1:])])
        taken.append(at)
        found.append(
            _text(WIDTH - RIGHT + 10, at + 4, curve.label, f"name {curve.style.split()[0]}", "start")
        )
    return found


def _marks(plot: _Plot, cost: Cost) -> list[str]:
    """Upright lines where pairs meet weights, and at the length that was asked for;
    their names stand at the foot.
    """
    bottom = HEIGHT - BOTTOM
    marks = [("asked", cost.sizes.tokens), ("T*", cost.crossover), ("causal T*", cost.causal_crossover)]
    places = [(plot.x(length), f"{name} {length:,.0f}") for name, length in marks if length and length >= 1]
    found = [f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>' for x, _ in places]
    return found + [
        _text(x + 6, bottom - 8 - 17 * row, words, "axis", "start") for row, (x, words) in enumerate(places)
    ]


def _text(x: float, y: float, words: str, style: str, anchor: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _short(tokens: int) -> str:
    return (
        f"{tokens // 1024}Ki"
        if tokens >= 1024 and tokens < 1 << 20
        else f"{tokens >> 20}Mi"
        if tokens >= 1 << 20
        else str(tokens)
    )
