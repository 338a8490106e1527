"""The depth curve as a picture: how far tokens can be from where they are, block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from regard.certificate import round_up
from regard.decisions.budget import Spent

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 30, 216


@dataclass(frozen=True)
class Tick:
    """A line across, and what stands beside it."""

    y: float
    text: str


@dataclass(frozen=True)
class Point:
    """A block: where it stands, the exact derivative there, and all that is proved."""

    x: float
    linear: float
    whole: float
    block: int
    share: str
    said: str


@dataclass(frozen=True)
class DepthChart:
    """Coordinates of a drawing of `WIDTH` by `HEIGHT`."""

    points: tuple[Point, ...]
    ticks: tuple[Tick, ...]

    @property
    def linear(self) -> str:
        """The line of exact derivatives."""
        return " ".join(f"{one.x:.1f},{one.linear:.1f}" for one in self.points)

    @property
    def whole(self) -> str:
        """The line of what is proved."""
        return " ".join(f"{one.x:.1f},{one.whole:.1f}" for one in self.points)

    @property
    def between(self) -> str:
        """What remainders add: from one line and back along the other."""
        back = " ".join(f"{one.x:.1f},{one.linear:.1f}" for one in reversed(self.points))
        return f"{self.whole} {back}"


def depth_chart(spent: Sequence[Spent]) -> DepthChart | None:
    """The drawing; None where there is nothing finite to draw."""
    seen = [one for one in spent if math.isfinite(one.linear + one.rest)]
    top = max((one.linear + one.rest for one in seen), default=0.0)
    if not top > 0:
        return None
    step = _step(top)
    count = math.ceil(top / step - 1e-9)

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / (count * step)

    points = tuple(
        _point(k, len(seen), one, y(one.linear), y(one.linear + one.rest)) for k, one in enumerate(seen)
    )
    return DepthChart(points, tuple(Tick(y(k * step), f"{k * step:.3g}") for k in range(count + 1)))


def _point(place: int, count: int, one: Spent, linear: float, whole: float) -> Point:
    room = WIDTH - RIGHT - LEFT
    x = LEFT + room * (0.5 if count == 1 else (place + 0.25) / (count - 0.5))
    share = f"{100 * one.share:.0f} %" if one.share >= 0.1 else f"{100 * one.share:.2g} %"
    proved = round_up(one.linear + one.rest)
    said = f"block {one.block + 1}: at most {proved}, of which {share} are beyond the derivative"
    return Point(x, linear, whole, one.block, share, said)


def _step(top: float) -> float:
    """A round number of which about four make the top."""
    size = 10.0 ** math.floor(math.log10(top / 4))
    return next((k * size for k in (1, 2, 5) if k * size * 4 >= top), 10 * size)
