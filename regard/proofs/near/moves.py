"""How far the rows of heads can move when token k moves by at most ρ_k.

With z_k = Vᵀy_k, q_k = d_iᵀA_k d_k and the laws P_t ∝ P e^{tζ}, the mean u = E[Vᵀx] of a row moves to u' with

    u' - u - Du[d] = (E' - E)[Vᵀd] + Cov(z, q) + {(E' - E)[z] - Cov(z, ζ)},                              (N13)

and the bracket is ∫₀¹ (1 - t) κ_t(z, ζ, ζ) dt, a third cumulant, or (E[z φ₂(ζ)] - (Z - 1) E[zζ])/Z. Results
are (rows,).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._upper import Upper
from regard.proofs.near.ellipsoids import Covariances, Ellipsoid, HeadShape, length_of_sum
from regard.proofs.near.exponential import tail, tail_over_square
from regard.proofs.near.head import LocalValues
from regard.proofs.near.heads import LocalHeads
from regard.proofs.near.linear import LinearMove
from regard.proofs.near.radii import STATIONS, TokenRadii
from regard.proofs.near.saturation import saturation

SLIGHTLY = 1.05
"""How much more than the linear part a bound may be for nothing else to be asked."""


@dataclass(frozen=True)
class RowMoves:
    """How far each row can move: by its linear part, beyond it (`plain`: by sizes alone),
    and as a whole by saturation.
    """

    straight: Ellipsoid
    beyond: tuple[Ellipsoid, ...]
    plain: Upper
    saturated: Callable[[], Upper]
    scores: tuple[TokenRadii, ...]

    @cached_property
    def linear(self) -> Upper:
        """At least |DF_i[d]| for each row."""
        return self.straight.length()

    @cached_property
    def remainder(self) -> Upper:
        """At least |F_i(x') - F_i(x) - DF_i[d]| for each row."""
        return length_of_sum(list(self.beyond)).minimum(self.plain)

    @cached_property
    def saturation(self) -> Upper:
        """At least |F_i(x') - F_i(x)| for each row, by what laws and values can reach at all."""
        return self.saturated()

    @cached_property
    def best(self) -> Upper:
        """At least |F_i(x') - F_i(x)| for each row."""
        joined = length_of_sum([self.straight, *self.beyond]).minimum(self.linear + self.plain)
        if bool(
            (joined.value <= SLIGHTLY * self.straight.size.value).all()
        ):  # no bound is much smaller than what is nearly attained
            return joined
        return joined.minimum(self.saturation)


def row_moves(heads: LocalHeads, linear: LinearMove, moves: Tensor, rows: slice = slice(None)) -> RowMoves:
    """All bounds, with the heads together, for all rows or some."""
    straight, heads = linear.ellipsoid(moves, rows), heads.with_rows(rows)
    scores = [TokenRadii(local, moves) for local in heads.heads]
    beyond = [_remainder(shape, score) for shape, score in zip(heads.shapes, scores, strict=True)]
    plain = heads.add([value.length() + law.length() for value, law in beyond])
    parts = tuple(part for parts in beyond for part in parts)
    return RowMoves(straight, parts, plain, lambda: saturation(heads, scores), tuple(scores))


def _remainder(shape: HeadShape, scores: TokenRadii) -> tuple[Ellipsoid, Ellipsoid]:
    """(N13) of one head as ellipsoids: (E' - E)[Vᵀd], and the rest, by deviations or by sizes,
    whichever is smaller in a row.
    """
    values, local = shape.folded, scores.local
    each, spread = _curvature(values, scores)
    series, cumulant = _series(values, scores), _third_cumulant(values, scores)
    short, light = each.value < spread.value, series.value < cumulant.value
    known = each.where(short) + series.where(light)
    by_query = local.a * scores.turn
    drifted = (local.law * scores.drift).sum(-1)
    weight = (
        scores.swap + (local.law * scores.reach).sum(-1) + by_query * drifted
    )  # of what z is multiplied by
    curved = (by_query * _drift_deviation(scores)).where(~short)
    parts = [Covariances(local.law, curved, values.spread, torch.ones_like(short))]
    bent = _bends(scores).where(~light)
    spreads, boxed = scores.value_spreads(values)
    parts += [Covariances(*one) for one in zip(scores.highs, bent, spreads, boxed, strict=True)]
    return shape.move(scores.total_change(scores.moves)), shape.within(known, weight, parts)


def _curvature(values: LocalValues, scores: TokenRadii) -> tuple[Upper, Upper]:
    """At least |Cov(z, q)|: key by key, and by deviations."""
    local = values.local
    factor = local.a * scores.turn
    each = (local.law * values.size * scores.drift).sum(-1)
    return factor * each, factor * values.spread * _drift_deviation(scores)


def _drift_deviation(scores: TokenRadii) -> Upper:
    """At least (E |d - E d|²)^{1/2}."""
    return (scores.local.law * scores.drift.square()).sum(-1).sqrt()


def _bends(scores: TokenRadii) -> Upper:
    """At least sd_t((ζ - E_tζ)²) at the stations t, times their weights in ∫ (1 - t) dt, (stations, rows).

    For a centered variable on [-A, B] with A + B = 2M and r = (A - B)/2, (x + A)(x - B)(x - r)² ≤ 0 bounds E
    x⁴, and then
    Var(x²) ≤ (2r² + M²)σ² + (M² - r²)r² - σ⁴ ≤ M⁴; also E x⁴ ≤ (2M)² σ².                                (N14)
    """
    middles = (torch.arange(STATIONS, dtype=torch.float64).unsqueeze(-1) + 0.5) / STATIONS
    weights = Upper((1 - middles) / STATIONS, 8)  # the weight of a piece is exact, its numbers are rounded
    return weights * scores.half.square().minimum(2 * scores.half * scores.spreads)


def _third_cumulant(values: LocalValues, scores: TokenRadii) -> Upper:
    """At least |∫ (1 - t) κ_t(z, ζ, ζ) dt|, where κ_t(z, ζ, ζ) = Cov_t(z,
    (ζ - E_tζ)²) ≤ sd_t(z) sd_t((ζ - E_tζ)²).
    """
    return (scores.value_spreads(values)[0] * _bends(scores)).sum(0)


def _series(values: LocalValues, scores: TokenRadii) -> Upper:
    """At least |E[z φ₂(ζ)] - ε E[zζ]|: key by key, or the quadratic part E[zζ²]/2 and the cubic one."""
    om, eps = scores.reach, scores.excess.unsqueeze(-1)
    first = (values.local.law * values.size * (tail(om, 2) + eps * om)).sum(-1)
    quadratic = _quadratic(values, scores).minimum(_second_moment(values, scores).halved())
    return first.minimum(quadratic + cubic_part(values, scores))


def _second_moment(values: LocalValues, scores: TokenRadii) -> Upper:
    """At least |E[z ζ²]|: zmax σ², or sd(z) ω* σ."""
    sigma = scores.deviation
    return (values.largest * sigma.square()).minimum(values.spread * scores.top * sigma)


def cubic_part(values: LocalValues, scores: TokenRadii) -> Upper:
    """At least |E[z φ₃(ζ)] - ε E[zζ]|: key by key, or by |φ₃(ζ)| ≤ ζ² φ₃(ω*)/ω*²."""
    om, eps = scores.reach, scores.excess.unsqueeze(-1)
    each = (values.local.law * values.size * (tail(om, 3) + eps * om)).sum(-1)
    together = _second_moment(values, scores) * tail_over_square(scores.top, 3)
    return each.minimum(together + values.spread * scores.excess * scores.deviation)


def _quadratic(values: LocalValues, scores: TokenRadii) -> Upper:
    """At least |E[z ζ²]|/2: the part of the row's own token exactly,
    and ζ² - (own·d_i)² ≤ 2 o (ω - o) + (ω - o)², o = ρ_i|own| (N15).
    """
    own, rest = scores.by_own, scores.beside_own
    mixed = (values.local.law * values.size * (2 * own * rest + rest.square())).sum(-1).halved()
    if not bool((scores.turn.value > 0).any()):
        return mixed
    return scores.turn.square().halved() * values.own_curvature + mixed
