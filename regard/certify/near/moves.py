"""How far the rows of heads can move when token k moves by at most ρ_k: the parts of deviation theorems. Results are (n,)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.certify.near.ellipsoids import Covariances, Ellipsoid, HeadShape, ball, gathered, head_shapes, spanned
from regard.certify.near.heads import LocalHead, LocalHeads, LocalValues
from regard.certify.near.linear import LinearMove
from regard.certify.near.matrix_norms import MARGIN, largest_root, row_norms


def exponential_tail(x: Tensor, order: int) -> Tensor:
    """φ₂ = eˣ - 1 - x or φ₃ = φ₂ - x²/2, from above, without cancellation near zero."""
    small = x < 0.5
    near = torch.where(small, x, torch.zeros_like(x))
    series = torch.zeros_like(x)
    term = near**order / (2.0 if order == 2 else 6.0)
    for k in range(order + 1, order + 14):
        series = series + term
        term = term * near / k
    direct = torch.expm1(x) - x - (0.0 if order == 2 else 0.5 * x * x)
    return torch.where(small, series + 2 * term, direct) * MARGIN


def quotient(x: Tensor, order: int, power: int) -> Tensor:
    """φ_order(x)/x^power, continued to zero."""
    safe = x.clamp_min(1e-150)
    limit = torch.full_like(x, 0.5 if order == power == 2 else 0.0)
    return torch.where(x > 1e-100, exponential_tail(safe, order) / safe**power, limit) * MARGIN


class ScoreMoves:
    """How far scores and weights of one head can move: `reach` ≥ |ζ_ik|, P between `low` and `high`."""

    def __init__(self, local: LocalHead, moves: Tensor) -> None:
        self.local, self.moves, queries = local, moves, queries_of(local)
        p = local.p
        self.alpha = local.alpha.expand_as(p)
        self.diagonal = queries.unsqueeze(-1) == torch.arange(local.n)  # where a row meets its own token
        self.turn = moves[queries]
        self.mean_move = p @ moves
        drift = (1 - 2 * p) * moves + self.mean_move.unsqueeze(-1)  # at least |d_k - E d|
        self.drift = torch.where(local.seen, drift, torch.zeros_like(drift))
        self.step = (self.alpha * moves).masked_fill(self.diagonal, 0.0)
        self.others = (p * self.step).sum(-1, keepdim=True) + (1 - 2 * p) * self.step
        self.by_own = self.turn.unsqueeze(-1) * local.own_size
        mixed = local.a * self.turn.unsqueeze(-1) * self.drift
        self.reach = (self.by_own + self.others + mixed) * MARGIN + 4 * local.eta
        self.reach = torch.where(local.seen, self.reach, torch.zeros_like(self.reach))
        self.top = self.reach.amax(-1)
        second = (p * self.step.square()).sum(-1).sqrt()
        cross = local.a * self.turn * (p @ moves.square()).sqrt()
        self.variance = ((self.turn * local.own_spread + second + cross + 4 * local.eta) * MARGIN).square()
        self._range()
        self._weights()

    def _range(self) -> None:
        """`climb` ≥ max_l ζ_k - ζ_l for each key, and `half` ≥ half of the largest difference in a row."""
        local = self.local
        each = self.step + local.a * self.turn.unsqueeze(-1) * self.moves
        ranged = self.turn[:, None, None] * local.own_apart + each.unsqueeze(-1) + each.unsqueeze(-2)
        ranged = ranged.masked_fill(~(local.seen.unsqueeze(-1) & local.seen.unsqueeze(-2)), 0.0)
        ranged.diagonal(dim1=-2, dim2=-1).zero_()
        self.climb = ranged.amax(-1) * MARGIN + 8 * local.eta
        self.half = self.climb.amax(-1) / 2

    def _weights(self) -> None:
        local, p = self.local, self.local.p
        rest = local.log_rest.exp().clamp_min(1e-300)
        odds = local.odds
        lifted = torch.sigmoid(odds + torch.minimum(self.reach / rest, self.climb))
        grown = (local.log_p + self.reach).exp().clamp(max=1e200)
        high = torch.minimum(grown, lifted)
        self.high = torch.where(local.seen, (high * MARGIN).clamp(max=1.0), torch.zeros_like(p))
        shrunk = (local.log_p - self.reach).exp()
        fall = shrunk / (shrunk + (grown.sum(-1, keepdim=True) - grown).clamp_min(0)).clamp_min(1e-300)
        fall = torch.maximum(torch.nan_to_num(fall, nan=0.0), torch.sigmoid(odds - self.climb))
        left = 1 - (self.high.sum(-1, keepdim=True) - self.high) * MARGIN
        self.low = torch.maximum(fall, left).clamp_min(0.0) / MARGIN
        self.low = torch.minimum(self.low, p)
        self.high = torch.maximum(self.high, p)

    def at(self, time: float) -> ScoreMoves:
        """The same for the laws P e^{tζ}/Z, with the change of scores cut to a part of it."""
        if time == 1:
            return self
        kept = self.__dict__.setdefault("_parts", {})
        if time not in kept:
            kept[time] = ScoreMoves.boxed(self.local, time * self.reach, time * self.climb, time * self.half)
        return kept[time]

    @staticmethod
    def boxed(local: LocalHead, reach: Tensor, climb: Tensor, half: Tensor) -> ScoreMoves:
        """Bounds of weights alone, from bounds of scores that are at hand."""
        made = object.__new__(ScoreMoves)
        made.local, made.reach, made.climb, made.half = local, reach, climb, half
        made._weights()
        return made

    @cached_property
    def stations(self) -> ScoreMoves:
        """`at` for all stations of a path, which come first: (stations, n, n)."""
        times = torch.arange(1, STATIONS + 1, dtype=torch.float64)[:, None, None] / STATIONS
        return ScoreMoves.boxed(self.local, times * self.reach, times * self.climb, times[..., 0] * self.half)

    def everywhere(self, bound: Callable[[ScoreMoves], Tensor]) -> Tensor:
        """A bound at all stations, (stations, n): together where rows are few, which saves calls, or one by one, which saves memory."""
        if len(self.half) <= FEW:
            return bound(self.stations)
        return torch.stack([bound(self.at(station / STATIONS)) for station in range(1, STATIONS + 1)])

    @cached_property
    def highs(self) -> Tensor:
        """The weights' upper bounds at all stations."""
        return self.everywhere(lambda tilted: tilted.high)

    @cached_property
    def spreads(self) -> Tensor:
        """At least the standard deviation of ζ under the laws P e^{sζ}/Z, s ≤ t, at all stations t: half its range, or its parts."""
        return torch.minimum(self.half, self.everywhere(self._spread))

    def _spread(self, tilted: ScoreMoves) -> Tensor:
        local, moves = self.local, self.moves
        narrow, left = local.own_narrow
        own = row_norms(tilted.high, narrow) + left + local.a * local.shift + 4 * local.tilt
        parts = self.turn * own + tilted.most(self.step.square()).sqrt() + local.a * self.turn * tilted.most(moves.square()).sqrt()
        return (parts + 4 * local.eta) * MARGIN

    @cached_property
    def excess(self) -> Tensor:
        """At least Z - 1, Z = E e^ζ."""
        p = self.local.p
        return torch.minimum((p * exponential_tail(self.reach, 2)).sum(-1), self.variance * quotient(self.top, 2, 2)) * MARGIN

    @cached_property
    def change(self) -> Tensor:
        """At least |P'_k - P_k|."""
        return torch.maximum(self.high - self.local.p, self.local.p - self.low)

    @cached_property
    def relative(self) -> Tensor:
        """At least |P'/P - 1| in L²(P), for each row."""
        p = self.local.p
        boxed = (self.change.square() / p.clamp_min(1e-300)).masked_fill(~self.local.seen, 0.0).sum(-1).sqrt()
        steep = torch.expm1(self.top) / self.top.clamp_min(1e-150)
        steep = torch.where(self.top > 1e-100, steep, torch.ones_like(steep))
        ranged = torch.sinh(self.half)  # E e^{2ζ}/(E e^ζ)² ≤ cosh² of half the range, by Kantorovich's inequality
        return torch.minimum(torch.minimum(boxed, steep * self.variance.sqrt()), ranged) * MARGIN

    @cached_property
    def swap(self) -> Tensor:
        """At least Σ_k |P'_k - P_k| f for f = 1: twice the total variation, at most 2 tanh(half/2)."""
        return 2 * torch.tanh(self.half / 2) * MARGIN

    def shifted(self, values: Tensor) -> Tensor:
        """At least Σ_k |P'_k - P_k| f_k for f ≥ 0 (n,)."""
        wide = values.expand_as(self.high)
        wide = torch.where(self.local.seen, wide, torch.zeros_like(wide))
        by_size = self.swap * wide.amax(-1)
        by_square = self.relative * (self.local.p * wide.square()).sum(-1).sqrt()
        return torch.minimum(torch.minimum(by_size, by_square), self.carried(wide)) * MARGIN

    def most(self, values: Tensor) -> Tensor:
        """max Σ P'_k f_k over laws between `low` and `high`, for f ≥ 0 (n, n) or (n,)."""
        values = values.expand_as(self.high)
        room = self.high - self.low
        order = values.argsort(-1, descending=True)
        sorted_room, sorted_values = room.gather(-1, order), values.gather(-1, order)
        free = (1 - self.low.sum(-1, keepdim=True) / MARGIN).clamp_min(0.0)
        before = sorted_room.cumsum(-1) - sorted_room
        filled = torch.minimum(sorted_room, (free - before).clamp_min(0.0))
        return ((self.low * values).sum(-1) + (filled * sorted_values).sum(-1)) * MARGIN

    def carried(self, values: Tensor) -> Tensor:
        """max Σ |P'_k - P_k| f_k: mass that is taken here and put there."""
        up, down = self.high - self.local.p, self.local.p - self.low
        mass = torch.minimum(up.sum(-1, keepdim=True), down.sum(-1, keepdim=True)) * MARGIN
        return _filled(values, up, mass) + _filled(values, down, mass)


def _filled(values: Tensor, room: Tensor, mass: Tensor) -> Tensor:
    order = values.argsort(-1, descending=True)
    sorted_room = room.gather(-1, order)
    before = sorted_room.cumsum(-1) - sorted_room
    return (torch.minimum(sorted_room, (mass - before).clamp_min(0.0)) * values.gather(-1, order)).sum(-1) * MARGIN


def _curved(values: LocalValues, scores: ScoreMoves) -> tuple[Tensor, Tensor]:
    """At least |Cov(z, q)|: key by key, and by deviations."""
    local, p = values.local, values.local.p
    factor = local.a * scores.turn
    return factor * (p * values.size * scores.drift).sum(-1), factor * values.spread * _drift(scores)


def _drift(scores: ScoreMoves) -> Tensor:
    return (scores.local.p * scores.drift.square()).sum(-1).sqrt()


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
    parts += [Covariances(*one) for one in zip(scores.highs, size, *_spreads(values, scores), strict=True)]
    return [shape.move(scores.shifted(scores.moves)), shape.within(known, parts, slice(None))]


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
    return (_spreads(values, scores)[0] * _bends(scores)).sum(0) * MARGIN


def spread_at(values: LocalValues, scores: ScoreMoves, time: float) -> Tensor:
    """At least the standard deviation of Vᵀx in any direction under every law P e^{tζ}/Z, at a station t."""
    return _spreads(values, scores)[0][round(time * STATIONS) - 1]


def _spreads(values: LocalValues, scores: ScoreMoves) -> tuple[Tensor, Tensor]:
    """The same at all stations, and where it is |[√high z]|."""
    kept = scores.__dict__.setdefault("_value_spreads", {})
    if id(values) not in kept:
        boxed = scores.everywhere(lambda tilted: row_norms(tilted.high, values.z) + values.w * values.local.shift)
        others = torch.minimum(scores.everywhere(lambda tilted: tilted.most(values.size.square()).sqrt()), values.half)
        kept[id(values)] = torch.minimum(boxed, others) * MARGIN, boxed <= others
    return kept[id(values)]


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


def saturated(values: LocalValues, scores: ScoreMoves) -> Tensor:
    """At least |u' - u| of each row however large the moves: mass that can change places, no exponential."""
    sizes = values.size
    carried = torch.minimum(scores.most(sizes), scores.carried(sizes))
    by_square = values.spread * scores.relative
    tilted = (_spreads(values, scores)[0] * scores.spreads).sum(0) / STATIONS * MARGIN  # ∫ Cov_t(z, ζ) dt
    apart = values.w * scores.most(scores.moves) + torch.minimum(torch.minimum(carried, by_square), tilted)
    return torch.minimum(apart, scores.most(pushed(values, scores.moves))) * MARGIN  # u' - u = E'[z + Vᵀd]


def pushed(values: LocalValues, moves: Tensor) -> Tensor:
    """At least |z_ik + Vᵀd| over |d| ≤ ρ_k: √(μρ² + Σ_c z_c² μ/(μ - s_c²)) for any μ > s_max², z in the singular basis of V."""
    singular, squares, outside = _in_singular_basis(values)
    best = values.size + values.w * moves
    for factor in (1.003, 1.01, 1.03, 1.1, 1.2, 1.5, 2.0, 4.0, 16.0):
        level = factor * values.w**2
        stretched = (squares * (level / (level - singular.square()))).sum(-1) + outside
        best = torch.minimum(best, (stretched + level * moves.square()).sqrt() * MARGIN + 40 * values.w * values.local.shift)
    return best


def _in_singular_basis(values: LocalValues) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values of V, squares of z in their basis, and of what is outside of it; the same for every move."""
    found = values.__dict__.get("_basis")
    if found is None:
        _, singular, basis = torch.linalg.svd(values.matrix, full_matrices=False)
        squares = (values.z @ basis.mT).square()
        outside = (values.z.square().sum(-1) - squares.sum(-1)).clamp_min(0.0)
        found = values.__dict__["_basis"] = singular, squares, outside
    return found


STATIONS = 6
"""How many points of a path are looked at; the integrand grows along it, so each piece is bounded by its far end."""
FEW = 4
"""Up to how many rows all of them are looked at together."""


@dataclass(frozen=True)
class RowMoves:
    """How far each row can move: by its linear part, beyond it (`plain`: by sizes alone), and as a whole by saturation."""

    straight: Ellipsoid
    beyond: tuple[Ellipsoid, ...]
    plain: Tensor
    saturation: Tensor

    @property
    def linear(self) -> Tensor:
        """At least |DF_i[d]| for each row."""
        return self.straight.size

    @cached_property
    def remainder(self) -> Tensor:
        """At least |F_i(x') - F_i(x) - DF_i[d]| for each row."""
        return torch.minimum(_number(gathered(list(self.beyond))), self.plain)

    @cached_property
    def best(self) -> Tensor:
        """At least |F_i(x') - F_i(x)| for each row."""
        joined = torch.minimum(_number(gathered([self.straight, *self.beyond])), self.linear + self.plain)
        return torch.minimum(joined, self.saturation) * MARGIN


def row_moves(heads: LocalHeads, linear: LinearMove, moves: Tensor, rows: slice = slice(None)) -> RowMoves:
    """All bounds, with the heads together, for all rows or some."""
    straight, heads = linear.ellipsoid(moves, rows), rows_of(heads, rows)
    scores = [ScoreMoves(local, moves) for local in heads.heads]
    beyond = [_beyond(shape, score) for shape, score in zip(head_shapes(heads), scores, strict=True)]
    plain = _added(heads, [sum((part.size + part.slack for part in parts), torch.zeros_like(scores[0].half)) for parts in beyond])
    saturation = torch.minimum(_apart(heads, scores), _tilted(heads, scores))
    if max(float(score.half.max()) for score in scores) > 1:  # before, laws are far from saturated
        saturation = torch.minimum(saturation, _paired(heads, scores))
    return RowMoves(straight, tuple(part for parts in beyond for part in parts), plain, saturation)


def queries_of(local: LocalHead) -> Tensor:
    """The tokens whose rows a head has: all, or those of `rows_of`."""
    found = local.__dict__.get("_queries")
    return torch.arange(local.n) if found is None else found


def rows_of(heads: LocalHeads, rows: slice) -> LocalHeads:
    """The same heads with some of their rows; made once, for every radius."""
    queries = torch.arange(heads.n)[rows]
    if len(queries) == heads.n:
        return heads
    kept = heads.__dict__.setdefault("_row_parts", {})
    key = tuple(queries.tolist())
    if key not in kept:
        kept.clear()
        kept[key] = _with_rows(heads, queries)
    return kept[key]


def _with_rows(heads: LocalHeads, queries: Tensor) -> LocalHeads:
    part = copy.copy(heads)
    part.heads = [_head_with_rows(local, queries) for local in heads.heads]
    part.separate = _values_with_rows(heads.separate, part.heads)
    part.folded = None if heads.folded is None else _values_with_rows(heads.folded, part.heads)
    part.__dict__["_shapes"] = shapes = [copy.copy(shape) for shape in head_shapes(heads)]
    for shape, separate, folded in zip(shapes, part.separate, part.separate if part.folded is None else part.folded, strict=True):
        shape.separate, shape.folded = separate, folded
    return part


def _values_with_rows(values: list[LocalValues], heads: list[LocalHead]) -> list[LocalValues]:
    return [LocalValues(local, value.matrix, value.w) for local, value in zip(heads, values, strict=True)]


BY_ROW = ("p", "log_p", "seen", "log_rest", "odds", "y", "alpha", "own", "own_size", "own_spread", "own_apart")
"""What a head has for each row, that bounds of rows read."""


def _head_with_rows(local: LocalHead, queries: Tensor) -> LocalHead:
    """Facts of some rows. Directions of these few are few themselves, and need no other coordinates."""
    part = copy.copy(local)
    part.__dict__.pop("own_pairs", None)
    part.__dict__.update({name: getattr(local, name)[queries] for name in BY_ROW})
    part.__dict__.update(own_narrow=(part.own, 0.0), _queries=queries)
    return part


def _apart(heads: LocalHeads, scores: list[ScoreMoves]) -> Tensor:
    """Saturation of each head on its own; what rows themselves move by is added."""
    values = heads.separate if heads.folded is None else heads.folded
    each = [saturated(v, s) for v, s in zip(values, scores, strict=True)]
    return _added(heads, each) + (scores[0].turn if heads.residual else 0.0)


def _added(heads: LocalHeads, each: list[Tensor]) -> Tensor:
    """Bounds of what heads add to the output; heads that are not mixed are side by side."""
    return _number(heads.combined(each, None) if heads.folded is None else torch.stack(each).sum(0) * MARGIN)


def _number(values: Tensor) -> Tensor:
    """What is no number is no bound."""
    return torch.nan_to_num(values, nan=math.inf, posinf=math.inf)


def _tilted(heads: LocalHeads, scores: list[ScoreMoves]) -> Tensor:
    """E'[Vᵀd] + ∫ Cov_t(z, ζ) dt of all heads together."""
    moves, parts = scores[0].moves, []
    for shape, score in zip(head_shapes(heads), scores, strict=True):
        found = zip(score.highs, score.spreads / STATIONS, *_spreads(shape.folded, score), strict=True)
        covariances = [Covariances(*one) for one in found]
        parts += [shape.move(score.most(moves)), shape.within(torch.zeros_like(score.half), covariances, slice(None))]
    if heads.residual:
        parts.append(ball(scores[0].turn, heads.d))
    return _number(gathered(parts))


def _paired(heads: LocalHeads, scores: list[ScoreMoves]) -> Tensor:
    """|y + g|² ≤ μ + yᵀ(I - D/μ)⁻¹y for g in the ellipsoid of D, the moves of values, μ > |D|; y = Σ_h E'[z_h] by pairs of heads."""
    shapes, moves = head_shapes(heads), scores[0].moves
    largest = torch.full((1,), float(moves.max()), dtype=torch.float64)
    parts = [shape.move(largest) for shape in shapes] + ([ball(largest, heads.d)] if heads.residual else [])
    reach = float(gathered(parts))
    spread = spanned(parts)
    raw = sum(shape.stretch * (2 * shape.folded.local.radius + float(largest)) for shape in shapes) + float(largest)
    lost = sum(shape.folded.w * shape.folded.local.shift for shape in shapes)
    best = torch.full_like(scores[0].half, math.inf)
    if not math.isfinite(reach) or reach <= 0:
        return best
    still = torch.eye(len(spread), dtype=torch.float64)
    ahead = float(_quadratic_form(shapes, scores, still).sqrt().median()) / reach  # the best level for y along the largest move
    parts_of_it = (0.6, 0.45) if len(best) <= FEW else (1.1, 0.7)  # any level certifies; a median over many rows is below most of them
    for part in parts_of_it if math.isfinite(ahead) else ():
        level = (1.02 + part * ahead) * reach**2
        inverse = torch.linalg.inv(still - spread / level)
        square = level + _quadratic_form(shapes, scores, inverse) + 1e-11 * raw**2
        best = torch.minimum(best, (square * MARGIN).sqrt() + 40 * lost)
    return _number(best)


def _quadratic_form(shapes: list[HeadShape], scores: list[ScoreMoves], form: Tensor) -> Tensor:
    """At least yᵀNy over the laws of all heads: E'[z_hᵀN z_h] for each, and 2 E'[z_hᵀN z_g] for each pair."""
    total = torch.zeros_like(scores[0].half)
    for h, (shape, score) in enumerate(zip(shapes, scores, strict=True)):
        left, z = shape.mixer @ form, shape.separate.z
        found = ((z @ (left @ shape.mixer.mT)) * z).sum(-1).clamp_min(0.0)
        for other, seen in ((shapes[g], scores[g].local.seen) for g in range(h)):
            pairs = (z @ (left @ other.mixer.mT)) @ other.separate.z.mT
            pairs = pairs if bool(seen.all()) else pairs.masked_fill(~seen.unsqueeze(1), -math.inf)
            found = found + 2 * pairs.amax(-1).clamp_min(0.0)
        total = total + score.most(found)
    return total


def together(heads: LocalHeads, scores: list[ScoreMoves], function: Callable[[LocalValues, ScoreMoves], Tensor]) -> Tensor:
    """A bound of each head, for both ways to combine them; what is no number is no bound."""
    separate = [function(v, s) for v, s in zip(heads.separate, scores, strict=True)]
    folded = None if heads.folded is None else [function(v, s) for v, s in zip(heads.folded, scores, strict=True)]
    return _number(heads.combined(separate, folded))
