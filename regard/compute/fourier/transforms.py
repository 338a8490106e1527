"""Transform: a way to take the sums of a series."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from regard._object import Object
from regard.certificate import Hypothesis
from regard.compute.fourier.series import Series


class Transform(Object):
    """Abstract: a way to take the sums of a series. Points (b, n, d) are centered, in bandwidths."""

    def convolve(self, x: Tensor, y: Tensor, strengths: Tensor, series: Series) -> Tensor:
        """Σ_j k̃(x_i - y_j) f_j, (b, m, c), for strengths (b, n, c)."""
        return self.values(x, self.grid(y, strengths, series), strengths.shape[-1], series)

    def fields(self, x: Tensor, y: Tensor, weights: Tensor, series: Series) -> Tensor:
        """D and ∇D of D(x) = Σ_j w_j k̃(x - y_j) at every query, (b, m, 1 + d)."""
        return self.slopes(x, self.grid(y, weights.unsqueeze(-1), series), series)

    @abstractmethod
    def grid(self, points: Tensor, strengths: Tensor, series: Series) -> Tensor:
        """The coefficients of the series of Σ_j k̃(· - y_j) f_j; those of two sets of points are added."""

    @abstractmethod
    def values(self, points: Tensor, grid: Tensor, columns: int, series: Series) -> Tensor:
        """The series with these coefficients at every query, (b, m, c)."""

    @abstractmethod
    def slopes(self, points: Tensor, grid: Tensor, series: Series) -> Tensor:
        """A series of one column and its gradient at every query, (b, m, 1 + d)."""

    @abstractmethod
    def rounding(self, series: Series, keys: int) -> tuple[float, float]:
        """By how much a sum, and the length of a gradient, may be off, for strengths of total size one."""

    @abstractmethod
    def seconds(self, series: Series, queries: int, keys: int, columns: int, fields: bool) -> float:
        """What a run would take on one core; an estimate."""

    @abstractmethod
    def bytes(self, series: Series, queries: int, keys: int, columns: int) -> float:
        """What a run would hold beyond inputs and output; an estimate."""

    @abstractmethod
    def hypotheses(self, series: Series) -> tuple[Hypothesis, ...]:
        """What `rounding` rests on."""
