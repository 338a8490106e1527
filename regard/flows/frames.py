"""Frames: what is drawn of a measure, small enough for a page: points, or the density of many."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.flows.cells import density, shape_of
from regard.measure import Measure

DRAWN = 2000
"""From so many particles on a density is drawn, or some of the particles."""
CELLS = {2: 720, 3: 64 * 128}
"""Cells of the circle and of the sphere at most; each holds twenty particles or more on average."""
LEVELS = 32767


@dataclass(frozen=True)
class Camera:
    """view: circle, globe or plane; drawn: how many particles are; cells: the shape of the density, None for
    points; axes (d, 2): what is drawn of directions, None for the first coordinates.
    """

    view: str
    drawn: int
    cells: tuple[int, ...] | None = None
    axes: Tensor | None = None

    def frame(self, measure: Measure) -> str:
        """What a page draws of a measure, in base64."""
        if self.cells is not None:
            share = density(measure, math.prod(self.cells)).log1p() / math.log1p(math.prod(self.cells))
            return _written((255 * share.clamp(0, 1)).round().to(torch.uint8))
        points = self._points(measure)
        masses = measure.masses()[:: self._every(measure)]
        size = masses / masses.max().clamp_min(1e-300)
        shown = torch.cat([points, size.unsqueeze(-1).to(points)], -1).clamp(-1, 1)
        return _written((LEVELS * shown).round().to(torch.int16))

    def _points(self, measure: Measure) -> Tensor:
        """The drawn coordinates (k, 2 or 3), at most one in size."""
        some = measure.points[:: self._every(measure)].detach().double()
        if self.axes is not None:
            return torch.nn.functional.normalize(some, dim=-1) @ self.axes
        return some[:, : 2 if self.view == "circle" else 3]

    def _every(self, measure: Measure) -> int:
        return -(-measure.size // max(self.drawn, 1))

    def written(self) -> dict[str, Any]:
        """As plain values."""
        wide = 3 if self.view == "globe" else 2
        return {"view": self.view, "drawn": self.drawn, "cells": self.cells, "width": wide + 1}


def camera_of(particles: int, dimension: int) -> Camera:
    """A circle, a globe, or the first three coordinates of a ball; a density where particles are many."""
    if particles > DRAWN and dimension in CELLS:
        view = "circle" if dimension == 2 else "globe"
        return Camera(view, 0, shape_of(dimension, min(CELLS[dimension], particles // 20)))
    return Camera("circle" if dimension == 2 else "globe", min(particles, DRAWN))


def principal_camera(states: list[Tensor]) -> Camera:
    """The plane in which the directions of tokens vary most, over all of these states."""
    unit = torch.nn.functional.normalize(torch.cat([x.detach().double() for x in states]), dim=-1)
    axes = torch.linalg.eigh(unit.mT @ unit)[1].flip(-1)[:, :2]
    heaviest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    longest = (unit @ axes).abs().max().clamp_min(1e-12)
    return Camera("plane", len(states[0]), None, axes * heaviest.sign() / longest)


def _written(numbers: Tensor) -> str:
    return base64.b64encode(numbers.contiguous().numpy().tobytes()).decode()
