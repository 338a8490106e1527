"""One row of attention near a law of keys: what is needed to bound it for every law that is close in W₁.

For a query x and keys μ = Σ w_j δ_{x_j}: k(y) = e^{s(x, y)}/μ(e^{s(x, ·)}), κ_j = k(x_j), u = T_μ(x), z(y) =
V(y) - u and h(y) = k(y) z(y), whose integral is zero. For every law ν

    T_ν(x) - u = (ν - μ)(h) / ν(k).

α = |θ| is the slope of scores, so |log k(y) - log κ_j| ≤ α |y - x_j|. Numbers are (m,) for rows, (m, n) for
atoms, (m, N) for candidates.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import Numbers, Vectors, computed_lengths
from regard._upper import ELEMENTARY, UNIT, Lower, Upper, exact, relative_error
from regard.domains import Ball, NearbyLaws, Vocabulary
from regard.proofs.candidates import Rows, about
from regard.proofs.setting import equivariant
from regard.proofs.subject import Head


class LawRows:
    """The rows of the given tokens as queries, for one head."""

    def __init__(self, head: Head, domain: NearbyLaws) -> None:
        equivariant(head, domain, "laws of tokens do not know positions")
        self.head, self.domain = head, domain
        law = domain.measure
        self.points, self.count = law.points, law.size
        self.middle = law.points.mean(0)
        self.rows = Rows(head, law.points, law, self.middle, self.reach)

    @cached_property
    def reach(self) -> Upper:
        """At least the distance of atoms and candidates from the middle of the atoms."""
        place = self.domain.within
        if isinstance(place, Vocabulary):
            return about(self.candidates, self.middle).lengths().amax()
        return about(self.center.unsqueeze(0), self.middle).lengths().amax() + exact(place.radius)

    @cached_property
    def masses(self) -> Upper:
        """At least w_j; the weights that are given sum to one up to rounding."""
        law = self.domain.measure
        return Upper(law.masses(), ELEMENTARY + law.size + 8)

    # Where mass may go

    @cached_property
    def candidates(self) -> Tensor:
        """The words of a vocabulary, in float64."""
        assert isinstance(self.domain.within, Vocabulary)
        return self.domain.within.points.detach().double()

    @cached_property
    def center(self) -> Tensor:
        """The center of a ball."""
        assert isinstance(self.domain.within, Ball)
        center = self.domain.within.center
        return torch.zeros_like(self.points[0]) if center is None else center.detach().double()

    @cached_property
    def radius(self) -> Upper:
        """The radius of a ball that holds atoms and candidates."""
        place = self.domain.within
        return exact(place.radius) if isinstance(place, Ball) else self.reach

    # Weights

    @cached_property
    def alpha(self) -> Upper:
        """At least |θ|, (m,)."""
        return self.rows.slopes.lengths()

    @cached_property
    def log_atoms(self) -> Numbers:
        """log κ_j, (m, n)."""
        return self.rows.log_odds(self.rows.keys)

    @cached_property
    def log_words(self) -> Numbers:
        """log k(y) of a vocabulary, (m, N)."""
        return self.rows.log_odds(self.rows.seen(self.candidates))

    @cached_property
    def largest(self) -> Tensor:
        """No log k(y) is above this, (m,)."""
        if isinstance(self.domain.within, Ball):
            return self.rows.log_odds_in(self.center, self.radius).largest()
        words = self.log_words.largest().amax(-1)
        return torch.maximum(words, self.log_atoms.largest().amax(-1))

    @cached_property
    def smallest(self) -> Tensor:
        """No log k(y) is below this, (m,)."""
        if isinstance(self.domain.within, Ball):
            at = self.rows.log_odds(self.rows.seen(self.center.unsqueeze(0)))
            return at.smallest(self.alpha.unsqueeze(-1) * self.radius)[:, 0]
        return torch.minimum(self.log_words.smallest().amin(-1), self.log_atoms.smallest().amin(-1))

    # Values

    def away(self, points: Vectors) -> Vectors:
        """z of points about the middle, (m, N, e)."""
        values, means = self.rows.values(points), self.rows.mean_values
        found = values.center.unsqueeze(0) - means.center.unsqueeze(1)
        longest = computed_lengths(values.center).amax() + computed_lengths(means.center).amax()
        return Vectors(found, values.error + means.error + Upper(2 * UNIT) * longest)

    @cached_property
    def atoms(self) -> Vectors:
        """z_j, (m, n, e)."""
        return self.away(self.rows.keys)

    @cached_property
    def farthest(self) -> Upper:
        """At least |z(y)|, (m,): no law moves a row farther."""
        if isinstance(self.domain.within, Ball):
            return self.rows.farthest_in(self.center, self.radius)
        words = self.away(self.rows.seen(self.candidates)).lengths().amax(-1)
        return words.maximum(self.atoms.lengths().amax(-1))

    def moments(self) -> Upper:
        """At least |h(y) - h(x_j)| for words y, (m, n, N), one row at a time."""
        rows = [self._moments_of(row) for row in range(len(self.points))]
        return Upper(torch.stack([row.bound for row in rows]))

    def _moments_of(self, row: int) -> Upper:
        words = self.away(self.rows.seen(self.candidates))
        here, there = self.atoms.center[row], words.center[row]
        kappa, k = self.log_atoms.center[row].exp(), self.log_words.center[row].exp()
        h_here, h_there = kappa.unsqueeze(-1) * here, k.unsqueeze(-1) * there
        apart = torch.cdist(h_here, h_there, compute_mode="donot_use_mm_for_euclid_dist")
        lost_here = _lost(kappa, here, self.atoms.error, self.log_atoms.error)
        lost_there = _lost(k, there, words.error, self.log_words.error)
        found = Upper(apart.clamp_min(1e-150), here.shape[-1] + 4)
        return found + lost_here.unsqueeze(-1) + lost_there.unsqueeze(0)

    @cached_property
    def apart(self) -> Lower:
        """At most |y - x_j| for words y, (n, N)."""
        found = torch.cdist(self.points, self.candidates, compute_mode="donot_use_mm_for_euclid_dist")
        return Lower(torch.where(found > 1e-140, found, 0.0), self.points.shape[-1] + 4)

    @cached_property
    def values_apart(self) -> Upper:
        """At least |V(y) - V_j| on a ball, (n,): |W|(R + |x_j - c|)."""
        return self.head.w * (self.radius + about(self.points, self.center).lengths())


def ball_around(domain: NearbyLaws) -> Upper:
    """At least the radius of a ball that holds every law of the domain."""
    place = domain.within
    if isinstance(place, Ball):
        return exact(place.radius)
    points = torch.cat([domain.measure.points, place.points.detach().double()])
    return about(points, points.mean(0)).lengths().amax()


def _lost(weight: Tensor, away: Tensor, error: Upper, log_error: Upper) -> Upper:
    """At least |k z - k̃ z̃| for k̃ and z̃ as computed: |k - k̃| |z̃| + k |z - z̃|, and the rounding of k̃ z̃."""
    relative, computed = log_error.expm1() + relative_error(2 * ELEMENTARY), Upper(weight, 1)
    return relative * computed * computed_lengths(away) + (relative + 1) * computed * error
