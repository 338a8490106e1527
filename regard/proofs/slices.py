"""Where in a ball keys can be that have a given weight: in a slice across the slope of the scores.

log k(y) = log k(c) + θ·(y - c) in a ball of radius R about c, so the weight says where y is along θ: at t =
(log k(y) - log k(c))/|θ|; across it, y is within q = √(R² - t²) of the axis. From a point p that is at t_p
along and a_p = √(|p - c|² - t_p²) across,

    (t - t_p)² + (a_p - q)₊² ≤ |y - p|² ≤ (t - t_p)² + (a_p + q)².
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import Numbers, Vectors
from regard._upper import UNIT, Lower, Upper, exact_lower
from regard.proofs.candidates import about
from regard.proofs.law_rows import Balls, LawRows


class Slices:
    """Of the balls that atoms may go to, for cells [low, high] of log k, (m, n, cells)."""

    def __init__(self, rows: LawRows, balls: Balls, low: Tensor, high: Tensor) -> None:
        self.rows, self.balls, self.low, self.high = rows, balls, low, high
        self.alpha = rows.alpha[:, None, None]
        self.alpha_low = rows.rows.slopes.lengths_low()[:, None, None]
        at = rows.log_centers(balls)
        self.center = Numbers(at.center.unsqueeze(-1), at.error)

    def nearest_atoms(self) -> Lower:
        """At most |y - x_j|, (m, n, cells)."""
        away = about(self.rows.points, self.balls.centers).lengths_low()[None, :, None]
        along = self._gap(self._atoms) / self.alpha
        across = (away.square() - (self._at_most(self._atoms) / self.alpha_low).square()).sqrt() - self._wide
        return (along.square() + across.square()).sqrt().maximum(along)

    def farthest_atoms(self) -> Upper:
        """At least |y - x_j|, (m, n, cells)."""
        away = about(self.rows.points, self.balls.centers).lengths()[None, :, None]
        found = self._farthest(away, self._atoms)
        return found.minimum((away + self.balls.radius).expand_as(found.value))

    def farthest_from_means(self) -> Upper:
        """At least |y - m_i|, m_i the mean of the row's law of keys, (m, n, cells)."""
        seen, means = self.rows.rows.seen(self.balls.centers), self.rows.rows.means
        rounding = Upper(2 * UNIT) * self.rows.rows.reach
        apart = Vectors(means.center.unsqueeze(1) - seen.center, means.error + seen.error + rounding)
        return self._farthest(apart.lengths().unsqueeze(-1), self._log_means)

    def _farthest(self, away: Upper, point: Numbers) -> Upper:
        """At least |y - p| for points p at most `away` from the center, with log k(p) as given."""
        across = (away.square() - (self._at_least(point) / self.alpha).square()).sqrt()
        along = self._span(point) / self.alpha_low
        return (along.square() + (across + self._wide).square()).sqrt()

    @cached_property
    def _atoms(self) -> Numbers:
        """log κ_j, (m, n, 1)."""
        atoms = self.rows.log_atoms
        return Numbers(atoms.center.unsqueeze(-1), atoms.error)

    @cached_property
    def _log_means(self) -> Numbers:
        """log k(m_i), since log k is affine, (m, 1, 1)."""
        means = self.rows.rows.means
        found = self.rows.rows.log_odds(means)
        error = found.error + self.rows.alpha.amax() * means.error
        return Numbers(found.center.diagonal()[:, None, None], error)

    @cached_property
    def _wide(self) -> Upper:
        """At least q, in every cell."""
        return (self.balls.radius.square() - (self._gap(self.center) / self.alpha).square()).sqrt()

    # Distances of logarithms

    def _gap(self, numbers: Numbers) -> Lower:
        """At most the distance of a number from a cell."""
        above, below = self.low - numbers.largest(), numbers.smallest() - self.high
        return exact_lower(torch.maximum(above, below).clamp_min(0.0) * (1 - 1e-15))

    def _span(self, numbers: Numbers) -> Upper:
        """At least the distance of a number from any point of a cell."""
        above, below = self.high - numbers.smallest(), numbers.largest() - self.low
        return Upper(torch.maximum(above, below).clamp_min(0.0), 1)

    def _at_most(self, numbers: Numbers) -> Upper:
        """At least |log k(p) - log k(c)|."""
        return Upper((numbers.center - self.center.center).abs(), 1) + numbers.error + self.center.error

    def _at_least(self, numbers: Numbers) -> Lower:
        """At most the same."""
        known = Lower((numbers.center - self.center.center).abs(), 1)
        return known - (numbers.error + self.center.error)
