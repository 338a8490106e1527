"""Heads on a Frobenius ball |x' - x|_F ≤ r: the constant of the map and how far its value moves, from facts
at the center.

η = P'/P - 1 is the relative change of a row law, χ ≥ its length in L²(P). With s_E the slope of scores along
a tangent E,

    J_i(x')E = E'[Vᵀe] + Cov'(z + Vᵀd, s_E + e_iᵀA d + d_iᵀA e),                                         (N29)
    Cov'(z, s_E) - Cov(z, s_E) = E[η z s_E] - E[η z] E[η s_E].                                           (N30)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch

from regard._round import spectral_norm_bound
from regard._upper import Upper, exact, relative_error, total
from regard.proofs.near.exponential import tail_over_square
from regard.proofs.near.frobenius import FrobeniusScores, symmetric_root
from regard.proofs.near.head import LocalValues
from regard.proofs.near.heads import LocalHeads

STATIONS = 6
DENSE = 1536
"""Up to this many inputs the norm at the center comes from the whole matrix."""
FAILURE = 1e-6
STARTS, POWERS = 4, 128
PRODUCTS = 1e-9
"""How far a product with JᵀJ may be off, relative to |J|²: assumed, and far more than rounding makes it."""


def shifted_values(scores: FrobeniusScores, values: LocalValues) -> Upper:
    """T_a: (E' - E)[Vᵀe] over all rows, per unit of movement."""
    return values.w * (scores.column * scores.relative.amax()).minimum(scores.law_change)


def constant_change(scores: FrobeniusScores, values: LocalValues) -> Upper:
    """At least |J(x') - J(x)| of one head: T_a + T_b + T_c + T_d, from (N29) and (N30).

    T_b for (N30), its parts along the row's own token and along the keys; T_c for Cov'(z, e_iᵀA d + d_iᵀA e);
    T_d for Cov'(Vᵀd, s_E + …).
    """
    local, r, w, a = scores.local, scores.r, values.w, scores.local.a
    chi, spread, own, top = scores.relative, values.spread, local.own_spread, scores.apart
    warped = _warp(scores, values)
    beyond = spread * chi.square()
    t_b = ((values.mixed * chi).minimum(own * warped) + own * beyond).amax() + scores.by_keys(
        warped + beyond, scores.off
    )
    t_c = 2 * a * r * (scores.value_spread(values) * top).amax()
    steep = local.alpha.amax(-1) + a * r
    slope = scores.query_spread + a * top * r
    columns = ((top * steep).square().unsqueeze(-1) * scores.laws.high).sum(0).amax().sqrt()
    t_d = w * r * ((top * slope).amax() + columns.minimum(scores.high_column * (steep * top).amax()))
    return shifted_values(scores, values) + t_b + t_c + t_d


def _warp(scores: FrobeniusScores, values: LocalValues) -> Upper:
    """At least |η z·e| in L²(P) over unit e: by the largest z, by the largest η,
    or by |η| ≤ steep |ζ| + Z - 1 and the parts of ζ.
    """
    local, r, law, alpha = scores.local, scores.r, scores.local.law, scores.alpha
    weighted = law.sqrt() * values.size
    longest = weighted.amax(-1)
    by_keys = (weighted * alpha).amax(-1) + values.spread * (law * alpha).norm()
    bent = local.a * r.square() * (longest + values.spread * law.norm())
    turned = r * (values.mixed.square() + by_keys.square()).sqrt() + bent
    whole = scores.steep * turned + scores.excess * values.spread
    return (values.largest * scores.relative).minimum(values.spread * scores.ratio, whole)


def direct_constant(scores: FrobeniusScores, values: LocalValues) -> Upper:
    """At least |J(x')| of one head by (N29), without its value at the center: it saturates instead of growing
    (N31).

    |E'[Vᵀe]| ≤ w (max column)^{1/2}; Cov'(z + Vᵀd, ·) with sd' ≤ wide: along the keys, along d_iᵀA e, and
    along the query.
    """
    local, r, w = scores.local, scores.r, values.w
    top = scores.apart
    wide = scores.value_spread(values) + w * top * r
    slope = scores.query_spread + local.a * top * r
    along_keys = scores.by_keys(wide, scores.split) + local.a * r * (wide * top).amax()
    return w * scores.high_column + along_keys + (wide * slope).amax()


def remainder_constant(scores: FrobeniusScores, values: LocalValues) -> Upper:
    """At least |F(x') - F(x) - J d|_F of one head: rows by b_i sd_i(ζ), gathered (N32)."""
    spread, sigma, law = values.spread, scores.deviation, scores.local.law
    second = (values.largest * sigma).minimum(spread * scores.top)
    series = tail_over_square(scores.top, 2) * (second + spread * sigma.square())
    factors = series.minimum(_cumulant_factor(scores, values))
    curved = scores.local.a * scores.r.square() * symmetric_root(spread.square().unsqueeze(-1) * law)
    return scores.gather(factors) + scores.r * shifted_values(scores, values) + curved


def _cumulant_factor(scores: FrobeniusScores, values: LocalValues) -> Upper:
    """∫ (1 - t) sd_t(z) 2M √(sup P_t/P) dt: with sd_t(ζ) ≤ √(sup P_t/P) sd(ζ),
    the third cumulant is at most that times sd(ζ).
    """
    local, parts = scores.local, []
    for station in range(1, STATIONS + 1):
        start, end = (station - 1) / STATIONS, station / STATIONS
        laws = scores.laws.part(end)
        grown = (laws.high / local.law_low).where(local.seen).amax(-1).sqrt()
        wide = values.z.spreads(laws.high).minimum(values.half)
        parts.append(Upper((end - start) * (1 - (start + end) / 2), 8) * wide * grown)
    return 2 * scores.half * total(parts)


def saturated_move(scores: FrobeniusScores, values: LocalValues) -> Upper:
    """At least |F(x') - F(x)|_F of one head however large the ball (N33)."""
    turned = values.largest.minimum(scores.laws.total_change(values.size), values.spread * scores.relative)
    return values.w * scores.high_column * scores.r + turned.norm()


class FrobeniusBall:
    """All heads on balls of any radius around one sequence."""

    def __init__(self, heads: LocalHeads) -> None:
        self.heads = heads
        self._kept: dict[float, tuple[Upper, Upper]] = {}

    @cached_property
    def norm(self) -> Upper:
        """At least |J| at the center, of all heads together; with probability `probability`."""
        n, d = self.heads.n, self.heads.d
        # tangents with |E|_F ≤ 1 have |e_j| ≤ 1 each, and the errors of rows are summed in ℓ²
        error = self.heads.jacobian_error(torch.ones(n, dtype=torch.float64)).norm()
        if n * d > DENSE:
            return self._drawn_norm() + error
        jacobian = self.heads.jacobian
        return (
            Upper(spectral_norm_bound(jacobian.permute(0, 2, 1, 3).reshape(n * jacobian.shape[2], n * d)))
            + error
        )

    @property
    def probability(self) -> float:
        """That of the norm at the center, over its own random start."""
        return 1.0 if self.heads.n * self.heads.d <= DENSE else 1 - FAILURE

    def _drawn_norm(self) -> Upper:
        """√θ max_b |M^{k/2} x_b|^{1/k} with M = JᵀJ: it fails only if each of the independent starts does
        (dixon1983, Theorem 1).
        """
        n, d = self.heads.n, self.heads.d
        block = torch.randn(
            n, d, STARTS, dtype=torch.float64
        )  # torch's own generator: torch.manual_seed makes it repeatable
        block = block / block.flatten(0, 1).norm(dim=0)
        logs = torch.zeros(STARTS, dtype=torch.float64)
        for _ in range(POWERS):
            block = self.heads.pull(self.heads.push(block))
            lengths = block.flatten(0, 1).norm(dim=0)
            logs = logs + lengths.log()
            block = block / lengths
        each = FAILURE ** (1 / STARTS) / (0.8 * math.sqrt(n * d)) - 2 * POWERS * PRODUCTS
        found = float((logs / (2 * POWERS)).exp().amax()) * each ** (-1 / (2 * POWERS))
        return Upper(found) * (1 + relative_error(POWERS * n * d))

    def constant(self, radius: float) -> Upper:
        """At least the Lipschitz constant on the ball."""
        if radius == 0 and math.isfinite(float(self.norm)):  # the derivative itself
            return self.norm
        change, direct = self._parts(radius)
        return (self.norm + change).minimum(1 + direct if self.heads.residual else direct)

    def deviation(self, radius: float) -> Upper:
        """At least |F(x') - F(x)|_F on the ball."""
        scores, r = self._scores(radius), exact(radius)
        taylor = self.norm * r + self._combine(scores, remainder_constant)
        whole = self._combine(scores, saturated_move)
        best = taylor.minimum(r + whole if self.heads.residual else whole)
        if float(best) > 1.5 * float(self.norm) * radius:  # a path cannot be shorter than its linear part
            ends = [math.nextafter(radius * k / 4, math.inf) for k in (1, 2, 3)]
            pieces = total([self.constant(end) for end in (*ends, radius)])
            best = best.minimum(pieces * r * exact(0.25))
        return best

    def _parts(self, radius: float) -> tuple[Upper, Upper]:
        if radius not in self._kept:
            scores = self._scores(radius)
            self._kept[radius] = (
                self._combine(scores, constant_change),
                self._combine(scores, direct_constant),
            )
        return self._kept[radius]

    def _scores(self, radius: float) -> list[FrobeniusScores]:
        return [FrobeniusScores(local, radius) for local in self.heads.heads]

    def _combine(
        self, scores: list[FrobeniusScores], bound: Callable[[FrobeniusScores, LocalValues], Upper]
    ) -> Upper:
        return self.heads.combine(lambda values, h: bound(scores[h], values))
