"""Processes: how numbers of all that compute together become one; Summed: a series over them."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._object import Object
from regard._round import outward
from regard._upper import UNIT
from regard.certificate import Hypothesis
from regard.compute.fourier.series import Series
from regard.compute.fourier.transforms import Transform


class Processes(Object):
    """Abstract: the processes that hold the points of one problem. Every one of them makes the same calls."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many they are."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Which of them this one is."""

    @abstractmethod
    def total(self, tensor: Tensor) -> Tensor:
        """The sum of their tensors, with the same numbers in every process."""

    @abstractmethod
    def largest(self, tensor: Tensor) -> Tensor:
        """The largest of their numbers, entry by entry."""

    def smallest(self, tensor: Tensor) -> Tensor:
        """The least of their numbers, entry by entry."""
        return -self.largest(-tensor)

    def most(self, value: float) -> float:
        """The largest of their numbers."""
        return float(self.largest(torch.tensor(value, dtype=torch.float64)))

    def every(self, holds: bool) -> bool:
        """Whether something holds in all of them."""
        return self.most(float(not holds)) == 0

    def stack(self, tensor: Tensor) -> Tensor:
        """The tensors of all of them, (processes, ...)."""
        found = tensor.new_zeros(self.count, *tensor.shape)
        found[self.rank] = tensor
        return self.total(found)


@dataclass(frozen=True, eq=False, repr=False)
class OneProcess(Processes):
    """This one."""

    count = 1
    rank = 0

    def total(self, tensor: Tensor) -> Tensor:
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        return tensor


@dataclass(frozen=True, eq=False, repr=False)
class Summed(Transform):
    """A transform whose points lie over processes: each takes the grid of its own points, the grids are
    added, and each evaluates the series at its own queries.
    """

    transform: Transform
    processes: Processes

    def grid(self, points: Tensor, strengths: Tensor, series: Series) -> Tensor:
        return self.processes.total(self.transform.grid(points, strengths, series))

    def values(self, points: Tensor, grid: Tensor, columns: int, series: Series) -> Tensor:
        return self.transform.values(points, grid, columns, series)

    def slopes(self, points: Tensor, grid: Tensor, series: Series) -> Tensor:
        return self.transform.slopes(points, grid, series)

    def rounding(self, series: Series, keys: int) -> tuple[float, float]:
        """That of one process with all keys, which has longer sums, and one rounding more for each of them.

        A coefficient of the grid is at most the total size of the strengths, and the size of the whole series
        is at most ∏ k̃(0) of it; so it is with parts of it, and √2 more where strengths are paired.
        """
        whole, steepest = self.transform.rounding(series, keys)
        top = 1 + series.axis_errors()[0]
        slope, d = series.moments()[2], series.dimension
        each = 2 * self.processes.count * UNIT * top ** (d - 1)
        return outward(whole + each * top), outward(steepest + each * math.sqrt(d) * slope)

    def seconds(self, series: Series, queries: int, keys: int, columns: int, fields: bool) -> float:
        sent = 16.0 * (1 if fields else columns) * series.count**series.dimension
        return self.transform.seconds(series, queries, keys, columns, fields) + 1e-3 + 2e-9 * sent

    def bytes(self, series: Series, queries: int, keys: int, columns: int) -> float:
        grid = 16.0 * columns * series.count**series.dimension
        return self.transform.bytes(series, queries, keys, columns) + grid

    def hypotheses(self, series: Series) -> tuple[Hypothesis, ...]:
        return self.transform.hypotheses(series)
