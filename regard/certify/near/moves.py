"""How far the rows of heads can move when token k moves by at most ρ_k: the parts of deviation theorems. Results are (n,)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.certify.near.ellipsoids import Covariances, Ellipsoid, HeadShape, gathered, head_shapes
from regard.certify.near.exponential import exponential_tail, quotient
from regard.certify.near.heads import LocalHeads, LocalValues
from regard.certify.near.linear import LinearMove
from regard.certify.near.matrix_norms import MARGIN, bounds, largest_root
from regard.certify.near.saturation import saturation
from regard.certify.near.score_moves import STATIONS, ScoreMoves, value_spreads
from regard.certify.near.some_rows import rows_of

SLIGHTLY = 1.05
"""How much more than the linear part a bound may be for nothing else to be asked."""


@dataclass(frozen=True)
class RowMoves:
    """How far each row can move: by its linear part, beyond it (`plain`: by sizes alone), and as a whole by saturation."""

    straight: Ellipsoid
    beyond: tuple[Ellipsoid, ...]
    plain: Tensor
    saturated: Callable[[], Tensor]

    @property
    def linear(self) -> Tensor:
        """At least |DF_i[d]| for each row."""
        return self.straight.size

    @cached_property
    def remainder(self) -> Tensor:
        """At least |F_i(x') - F_i(x) - DF_i[d]| for each row."""
        return torch.minimum(bounds(gathered(list(self.beyond))), self.plain)

    @cached_property
    def saturation(self) -> Tensor:
        """At least |F_i(x') - F_i(x)| for each row, by what laws and values can reach at all."""
        return self.saturated()

    @cached_property
    def best(self) -> Tensor:
        """At least |F_i(x') - F_i(x)| for each row."""
        joined = torch.minimum(bounds(gathered([self.straight, *self.beyond])), self.linear + self.plain)
        attained = self.linear - self.straight.slack  # without its rounding
        if bool((joined <= SLIGHTLY * attained).all()):  # no bound is much smaller than what is nearly attained
            return joined * MARGIN
        return torch.minimum(joined, self.saturation) * MARGIN


def row_moves(heads: LocalHeads, linear: LinearMove, moves: Tensor, rows: slice = slice(None)) -> RowMoves:
    """All bounds, with the heads together, for all rows or some."""
    straight, heads = linear.ellipsoid(moves, rows), rows_of(heads, rows)
    scores = [ScoreMoves(local, moves) for local in heads.heads]
    beyond = [_beyond(shape, score) for shape, score in zip(head_shapes(heads), scores, strict=True)]
    plain = heads.added([sum((part.size + part.slack for part in parts), torch.zeros_like(scores[0].half)) for parts in beyond])
    return RowMoves(straight, tuple(part for parts in beyond for part in parts), plain, lambda: saturation(heads, scores))


def _beyond(shape: HeadShape, scores: ScoreMoves) -> list[Ellipsoid]:
    """The remainder of one head as ellipsoids."""
    values, none = shape.folded, torch.zeros_like(scores.half)
    each, spread = _curved(values, scores)
    tail, third = _exponential_part(values, scores), _third(values, scores)
    short, light = each < spread, tail < third
    known = torch.where(short, each, none) + torch.where(light, tail, none)
    curved = torch.where(short, none, scores.local.a * scores.turn * _drift(scores))
    parts = [Covariances(scores.local.p, curved, values.spread, torch.ones_like(short))]
    size = torch.where(light, none, _bends(scores))
    parts += [Covariances(*one) for one in zip(scores.highs, size, *value_spreads(values, scores), strict=True)]
    return [shape.move(scores.shifted(scores.moves)), shape.within(known, parts)]


def _curved(values: LocalValues, scores: ScoreMoves) -> tuple[Tensor, Tensor]:
    """At least |Cov(z, q)|: key by key, and by deviations."""
    local, p = values.local, values.local.p
    factor = local.a * scores.turn
    return factor * (p * values.size * scores.drift).sum(-1), factor * values.spread * _drift(scores)


def _drift(scores: ScoreMoves) -> Tensor:
    return (scores.local.p * scores.drift.square()).sum(-1).sqrt()


def _bends(scores: ScoreMoves) -> Tensor:
    """At least sd((ζ - E_tζ)²) at the stations t, times their weights in ∫ (1 - t) dt, (stations, n)."""
    middles = (torch.arange(STATIONS, dtype=torch.float64).unsqueeze(-1) + 0.5) / STATIONS
    bent = torch.minimum(scores.half.square(), 2 * scores.half * scores.spreads)  # E x⁴ ≤ (2M)² E x²
    return (1 - middles) / STATIONS * bent * MARGIN


def _third(values: LocalValues, scores: ScoreMoves) -> Tensor:
    """|∫ (1 - t) κ_t(z, ζ, ζ) dt| over the laws P_t ∝ P e^{tζ}: κ_t ≤ sd_t(z) sd_t((ζ - E_tζ)²), the latter at most half the range squared.

    For a centered variable on [-A, B] with A + B = 2M and r = (A - B)/2, (x + A)(x - B)(x - r)² ≤ 0 bounds E x⁴, and then
    Var(x²) ≤ (2r² + M²)σ² + (M² - r²)r² - σ⁴ ≤ M⁴.
    """
    return (value_spreads(values, scores)[0] * _bends(scores)).sum(0) * MARGIN


def _exponential_part(values: LocalValues, scores: ScoreMoves) -> Tensor:
    p, om, eps = values.local.p, scores.reach, scores.excess.unsqueeze(-1)
    weighted = p * values.size
    deviation = scores.variance.sqrt()
    second = torch.minimum(values.largest * scores.variance, values.spread * scores.top * deviation)
    first = (weighted * (exponential_tail(om, 2) + eps * om)).sum(-1)
    quadratic = torch.minimum(_quadratic(values, scores), second / 2)
    return torch.minimum(first, quadratic + cubic_part(values, scores))


def cubic_part(values: LocalValues, scores: ScoreMoves) -> Tensor:
    """At least |E[z φ₃(ζ)] - ε E[z ζ]|."""
    om, eps, deviation = scores.reach, scores.excess.unsqueeze(-1), scores.variance.sqrt()
    second = torch.minimum(values.largest * scores.variance, values.spread * scores.top * deviation)
    each = (values.local.p * values.size * (exponential_tail(om, 3) + eps * om)).sum(-1)
    return torch.minimum(each, second * quotient(scores.top, 3, 2) + values.spread * scores.excess * deviation) * MARGIN


def _quadratic(values: LocalValues, scores: ScoreMoves) -> Tensor:
    """At least |E[z ζ²]|/2: the part of the query exactly, the rest by its size."""
    p, own = values.local.p, scores.by_own
    rest = (scores.reach - own).clamp_min(0.0)
    mixed = (p * values.size * (2 * own * rest + rest.square())).sum(-1) / 2
    if not bool((scores.turn > 0).any()):
        return mixed
    return scores.turn.square() / 2 * _own_curvature(values) + mixed


def _own_curvature(values: LocalValues) -> Tensor:
    """|Σ_k P_k z_k (own_k·e)²| over unit e, from above: λ_max((Pz)ᵀ[(own_k·own_l)²](Pz))^{1/2}."""
    found = values.__dict__.get("_curvature")
    if found is None:
        weighted = values.z * values.local.p.unsqueeze(-1)
        root = largest_root(weighted.mT @ values.local.own_pairs @ weighted)
        slack = values.local.a * values.local.shift + 4 * values.local.tilt
        sizes = values.local.own_size
        around = (
            values.local.p * (values.size * (2 * sizes * slack + slack * slack) + values.w * values.local.shift * sizes.square())
        ).sum(-1)
        found = (root + 2 * around) * MARGIN
        values.__dict__["_curvature"] = found
    return found
