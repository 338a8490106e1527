"""A cut-off Fourier series of the Gauss kernel, for sums Σ_j e^{-|x_i - y_j|²/2} f_j in O(m + n).
On each axis, for |z| ≤ reach, with a = `step` and the period P = 2π/a,

    e^{-z²/2} ≈ Σ_{|k| ≤ modes} a/√(2π) e^{-(ak)²/2} e^{iakz} ,

which separates x from y. What is left out are the images at distances lP (Poisson summation) and the terms
beyond `modes`; both are bounded here before anything runs, and so is rounding. All sums are in float64: a
query far from everyone sees a mass that is small beside the error of float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._round import outward
from regard._upper import ELEMENTARY

PHASE = 13
"""Units by which a phase may be off: centering, scaling and one product, each relative to |phase| ≤ π."""


@dataclass(frozen=True)
class Series:
    """The series on each of `dimension` axes, for |x - y| ≤ reach on each, in units of the bandwidth."""

    step: float
    modes: int
    reach: float
    dimension: int

    @staticmethod
    def of(gap: float, reach: float, dimension: int) -> Series:
        """Images are `gap` away from every pair, and frequencies end at `gap`:
        both leave out about e^{-gap²/2}.
        """
        step = 2 * math.pi / (reach + gap)
        return Series(step, max(1, math.ceil(gap / step)), reach, dimension)

    @property
    def count(self) -> int:
        """Basis functions on one axis: 1, and a cosine and a sine for each frequency."""
        return 2 * self.modes + 1

    def axis_errors(self) -> tuple[float, float]:
        """At least |k - k̃| and |k' - k̃'| on one axis, for all |z| ≤ reach.

        The cut-off terms are largest at z = 0, and are below a geometric series from the first on. Images are
        monotone where they are at least one bandwidth away, so that they are largest at |z| = reach.
        """
        first = self.step * (self.modes + 1)
        ratio = _exp_bound(-0.5 * self.step**2 * (2 * self.modes + 3))
        steeper = ratio * (self.modes + 2) / (self.modes + 1)
        period = 2 * math.pi / self.step
        gap = (period - self.reach) * (1 - 1e-13) - 1e-13 * self.reach
        if gap < 1 or max(ratio, steeper) > 0.999:
            return math.inf, math.inf
        tail = 2 * self.step / math.sqrt(2 * math.pi) * _exp_bound(-0.5 * first**2)
        image = 2 * _exp_bound(-0.5 * gap**2)  # each of the two nearest, and then one period farther
        farther = (1 + period / gap) * _exp_bound(-period * gap - 0.5 * period**2)
        error = tail / (1 - ratio) + image / (1 - farther)
        slope = tail * first / (1 - steeper) + gap * image / (1 - farther)
        return outward(error), outward(slope)

    def errors(self) -> tuple[float, float]:
        """At least |k - k̃| and |∇k - ∇k̃| in all dimensions: products of factors that are at most one."""
        error, slope = self.axis_errors()
        others = outward((1 + error) ** (self.dimension - 1))
        missing = outward(math.expm1((self.dimension - 1) * math.log1p(error)))
        whole = outward(math.expm1(self.dimension * math.log1p(error)))
        gradient = math.sqrt(self.dimension) * (slope * others + math.exp(-0.5) * missing)
        return whole, outward(gradient)

    def coefficients(self) -> Tensor:
        """Of 1, cos(az), ..., sin(az), ...: those of cosines twice, since k and -k are one."""
        k = torch.arange(self.modes + 1, dtype=torch.float64)
        found = self.step / math.sqrt(2 * math.pi) * torch.exp(-0.5 * (self.step * k).square())
        found[1:] *= 2
        return torch.cat([found, found[1:]])

    def moments(self) -> tuple[float, float, float, float]:
        """Σ_k g_k times |k|, (ak)², a|k|, and a|k| · (64|k| + 24 + 3(ak)²): how rounding is weighted."""
        g = self.coefficients()[: self.modes + 1]
        k = torch.arange(self.modes + 1, dtype=torch.float64)
        ak = self.step * k
        weights = (k, ak.square(), ak, ak * (2 * self.power_units() * k + 24 + 3 * ak.square()))
        first, second, slope, steep = (outward(float((g * weight).sum())) for weight in weights)
        return first, second, slope, steep

    @staticmethod
    def power_units() -> int:
        """Units by which e^{iakx} is off for each k: that of its base, of its phase, and one product."""
        return ELEMENTARY + PHASE + 3


def _exp_bound(value: float) -> float:
    """At least e^value for a value ≤ 0 that is rounded a few times."""
    return outward(math.exp(value * (1 - 1e-14))) if value > -690 else 1e-299
