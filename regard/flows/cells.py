"""Cells of the circle and of the sphere, all of one size: a density of many particles and its regions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard.dynamics import Observable
from regard.errors import ArgumentError
from regard.measure import Measure

DENSE = 2.0
"""A cell is dense from so many times the mean density."""


@dataclass(frozen=True, eq=False, repr=False)
class DenseRegions(Observable):
    """How many connected regions have at least twice the mean density, over `cells` equal cells of the circle
    or of the sphere: what clusters are where there are too many particles to chain.
    """

    cells: int = 720

    def __post_init__(self) -> None:
        _check.positive("cells", self.cells)

    @property
    def name(self) -> str:
        return "dense regions"

    def number(self, now: Measure, begin: Measure) -> float:
        return float(_regions(density(now, self.cells) >= DENSE))


def shape_of(dimension: int, cells: int) -> tuple[int, ...]:
    """(k,) of the circle by angle; (rows by height, columns by angle) of the sphere, all of one area."""
    if dimension == 2:
        return (cells,)
    if dimension == 3:
        rows = max(2, math.isqrt(cells // 2))
        return (rows, 2 * rows)
    found = f"is {dimension}"
    raise ArgumentError("dimension", found, "cells are those of the circle and of the sphere in space")


def density(measure: Measure, cells: int) -> Tensor:
    """The mass of each cell over its share of the circle or sphere; the mean is one."""
    shape = shape_of(measure.dimension, cells)
    turn = torch.atan2(measure.points[:, 1], measure.points[:, 0]) / (2 * math.pi) + 0.5
    places = [(turn * shape[-1]).long().clamp(0, shape[-1] - 1)]
    if len(shape) == 2:
        height = (measure.points[:, 2] + 1) / 2
        places.append((height * shape[0]).long().clamp(0, shape[0] - 1) * shape[1])
    count = math.prod(shape)
    masses = measure.masses()
    found = torch.zeros(count, dtype=masses.dtype).index_add(0, sum(places[1:], places[0]), masses)
    return (found * count).reshape(shape)


def _regions(dense: Tensor) -> int:
    """Connected groups of cells; the cells around a pole touch each other."""
    left = {tuple(place) for place in dense.nonzero().tolist()}
    count = 0
    while left:
        count, front = count + 1, [left.pop()]
        while front:
            near = _neighbors(front.pop(), dense.shape) & left
            left -= near
            front += near
    return count


def _neighbors(place: tuple[int, ...], shape: torch.Size) -> set[tuple[int, ...]]:
    if len(place) == 1:
        return {((place[0] + step) % shape[0],) for step in (-1, 1)}
    row, column = place
    found: set[tuple[int, ...]] = {(row, (column + step) % shape[1]) for step in (-1, 1)}
    found |= {(row + step, column) for step in (-1, 1) if 0 <= row + step < shape[0]}
    if row in (0, shape[0] - 1):
        found |= {(row, other) for other in range(shape[1])}
    return found
