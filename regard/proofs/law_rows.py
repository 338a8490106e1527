"""One row of attention near a law of keys: what is needed to bound it for every law that is close in W₁.

For a query x and keys μ = Σ w_j δ_{x_j}: k(y) = e^{s(x, y)}/μ(e^{s(x, ·)}), κ_j = k(x_j), u = T_μ(x), z(y) =
V(y) - u and h(y) = k(y) z(y), whose integral is zero. For every law ν

    T_ν(x) - u = (ν - μ)(h) / ν(k).

α = |θ| is the slope of scores, so |log k(y) - log κ_j| ≤ α |y - x_j|. Numbers are (m,) for rows, (m, n) for
atoms, (m, N) for candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import Numbers, Vectors, computed_lengths
from regard._upper import ELEMENTARY, UNIT, Lower, Upper, exact, relative_error
from regard.domains import Ball, NearbyLaws, Tube, Vocabulary
from regard.proofs.candidates import Rows, about
from regard.proofs.setting import equivariant, finite_ball, middle
from regard.proofs.subject import Head


@dataclass(frozen=True)
class Balls:
    """Where mass may go: that of atom j to the ball about the center j of (n, d), or about the only one."""

    centers: Tensor
    radius: Upper
    shift: int = 0
    """In a tube: the center j is the atom so many before j."""


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
        centers = self.points if isinstance(place, Tube) else self.center.unsqueeze(0)
        return about(centers, self.middle).lengths().amax() + exact(place.radius)

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
    def balls(self) -> list[Balls]:
        """The ball, or those of a tube: each atom's own, and every other where mass may jump."""
        place = self.domain.within
        assert isinstance(place, (Ball, Tube))
        radius = exact(place.radius)
        if isinstance(place, Ball):
            return [Balls(self.center.unsqueeze(0), radius)]
        shifts = range(self.count) if place.jumps else (0,)
        return [Balls(self.points.roll(shift, 0), radius, shift) for shift in shifts]

    @cached_property
    def own_radius(self) -> Upper | None:
        """How far mass may go at the most, where all of it stays around its atom."""
        place = self.domain.within
        return exact(place.radius) if isinstance(place, Tube) and not place.jumps else None

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

    def log_centers(self, balls: Balls) -> Numbers:
        """log k of the centers, (m, n) or (m, 1)."""
        return self.rows.log_odds(self.rows.seen(balls.centers))

    @cached_property
    def largest(self) -> Tensor:
        """No log k(y) is above this, (m,)."""
        place = self.domain.within
        if isinstance(place, Ball):
            return self.rows.log_odds_in(self.center, exact(place.radius)).largest()
        if isinstance(place, Tube):
            return self._around(exact(place.radius)).amax(-1)
        words = self.log_words.largest().amax(-1)
        return torch.maximum(words, self.log_atoms.largest().amax(-1))

    @cached_property
    def largest_from(self) -> Tensor:
        """No log k(y) is above this where the mass of an atom may go, (m, n) or (m, 1)."""
        own = self.own_radius
        return self.largest.unsqueeze(-1) if own is None else self._around(own)

    def _around(self, radius: Upper) -> Tensor:
        """log κ_j + αr, (m, n)."""
        return self.log_atoms.largest(self.alpha.unsqueeze(-1) * radius)

    @cached_property
    def smallest(self) -> Tensor:
        """No log k(y) is below this, (m,)."""
        place = self.domain.within
        if isinstance(place, Vocabulary):
            return torch.minimum(self.log_words.smallest().amin(-1), self.log_atoms.smallest().amin(-1))
        at = self.log_centers(self.balls[0])
        return at.smallest(self.alpha.unsqueeze(-1) * exact(place.radius)).amin(-1)

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
        place = self.domain.within
        if isinstance(place, Ball):
            return self.rows.farthest_in(self.center, exact(place.radius))
        if isinstance(place, Tube):
            return self.atoms.lengths().amax(-1) + self.head.w * exact(place.radius)
        words = self.away(self.rows.seen(self.candidates)).lengths().amax(-1)
        return words.maximum(self.atoms.lengths().amax(-1))

    @cached_property
    def farthest_from(self) -> Upper:
        """At least |z(y)| where the mass of an atom may go, (m, n) or (m, 1)."""
        own = self.own_radius
        return self.farthest.unsqueeze(-1) if own is None else self.atoms.lengths() + self.head.w * own

    @cached_property
    def spreads(self) -> Upper:
        """At least the root of the largest variance of the keys in each row, in any direction, (m,)."""
        keys, means = self.rows.keys, self.rows.means
        rounding = Upper(2 * UNIT) * self.rows.reach
        away = keys.center.unsqueeze(0) - means.center.unsqueeze(1)
        law = (self.masses.unsqueeze(0) * self.log_atoms.exp()).minimum(exact(torch.ones_like(away[..., 0])))
        return Vectors(away, keys.error + means.error + rounding).spreads(law)

    def moments(self) -> Upper:
        """At least |h(y) - h(x_j)| for words y, (m, n, N), one row at a time."""
        words = self.away(self.rows.seen(self.candidates))
        return self._moments(words, self.log_words)

    @cached_property
    def atom_moments(self) -> Upper:
        """At least |h(x_i) - h(x_j)|, (m, n, n)."""
        return self._moments(self.atoms, self.log_atoms)

    def _moments(self, words: Vectors, logs: Numbers) -> Upper:
        rows = [self._moments_of(row, words, logs) for row in range(len(self.points))]
        return Upper(torch.stack([row.bound for row in rows]))

    def _moments_of(self, row: int, words: Vectors, logs: Numbers) -> Upper:
        here, there = self.atoms.center[row], words.center[row]
        kappa, k = self.log_atoms.center[row].exp(), logs.center[row].exp()
        h_here, h_there = kappa.unsqueeze(-1) * here, k.unsqueeze(-1) * there
        apart = torch.cdist(h_here, h_there, compute_mode="donot_use_mm_for_euclid_dist")
        lost_here = _lost(kappa, here, self.atoms.error, self.log_atoms.error)
        lost_there = _lost(k, there, words.error, logs.error)
        found = Upper(apart.clamp_min(1e-150), here.shape[-1] + 4)
        return found + lost_here.unsqueeze(-1) + lost_there.unsqueeze(0)

    @cached_property
    def apart(self) -> Lower:
        """At most |y - x_j| for words y, (n, N)."""
        found = torch.cdist(self.points, self.candidates, compute_mode="donot_use_mm_for_euclid_dist")
        return Lower(torch.where(found > 1e-140, found, 0.0), self.points.shape[-1] + 4)


def ball_around(domain: NearbyLaws) -> Ball:
    """A ball that holds every law of the domain."""
    place, points = domain.within, domain.measure.points
    if isinstance(place, Ball):
        center = torch.zeros_like(points[0]) if place.center is None else place.center.detach().double()
        return Ball(place.radius, center)
    more = exact(place.radius if isinstance(place, Tube) else 0.0)
    points = torch.cat([points, place.points.detach().double()]) if isinstance(place, Vocabulary) else points
    center = middle(points)
    return finite_ball(about(points, center).lengths().amax() + more, center, None)


def _lost(weight: Tensor, away: Tensor, error: Upper, log_error: Upper) -> Upper:
    """At least |k z - k̃ z̃| for k̃ and z̃ as computed: |k - k̃| |z̃| + k |z - z̃|, and the rounding of k̃ z̃."""
    relative, computed = log_error.expm1() + relative_error(2 * ELEMENTARY), Upper(weight, 1)
    return relative * computed * computed_lengths(away) + (relative + 1) * computed * error
