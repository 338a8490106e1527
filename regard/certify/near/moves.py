"""How far the rows of heads can move when token k moves by at most ρ_k: the parts of deviation theorems. Results are (n,)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.certify.near.ellipsoids import Covariances, Ellipsoid, HeadShape, ball, gathered, head_shapes, spanned
from regard.certify.near.heads import MARGIN, LocalHead, LocalHeads, LocalValues, largest_root, row_norms
from regard.certify.near.linear import LinearMove


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
        self.local, self.moves = local, moves
        p, n = local.p, local.n
        self.alpha = local.alpha.expand(n, n)
        index = torch.arange(n)
        self.mean_move = p @ moves
        drift = (1 - 2 * p) * moves + self.mean_move.unsqueeze(-1)  # at least |d_k - E d|
        self.drift = torch.where(local.seen, drift, torch.zeros_like(drift))
        pull = p * self.alpha * moves
        pull[index, index] = 0.0
        step = self.alpha * moves
        step = step.expand(n, n).clone()
        step[index, index] = 0.0
        self.others = pull.sum(-1, keepdim=True) + (1 - 2 * p) * step
        self.by_own = moves.unsqueeze(-1) * local.own_size
        mixed = local.a * moves.unsqueeze(-1) * self.drift
        self.reach = (self.by_own + self.others + mixed) * MARGIN + 4 * local.eta
        self.reach = torch.where(local.seen, self.reach, torch.zeros_like(self.reach))
        self.top = self.reach.amax(-1)
        second = torch.where(torch.eye(n, dtype=torch.bool), torch.zeros_like(p), p * (self.alpha * moves).square()).sum(-1).sqrt()
        cross = local.a * moves * (p @ moves.square()).sqrt()
        self.variance = ((moves * local.own_spread + second + cross + 4 * local.eta) * MARGIN).square()
        self._range()
        self._weights()

    def _range(self) -> None:
        """`climb` ≥ max_l ζ_k - ζ_l for each key, and `half` ≥ half of the largest difference in a row."""
        local, moves, n = self.local, self.moves, self.local.n
        each = self.alpha * moves
        each = each.expand(n, n).clone()
        each[torch.arange(n), torch.arange(n)] = 0.0
        each = each + local.a * moves.unsqueeze(-1) * moves
        ranged = moves[:, None, None] * local.own_apart + each.unsqueeze(-1) + each.unsqueeze(-2)
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

    def spread_at(self, time: float) -> Tensor:
        """At least the standard deviation of ζ under the laws P e^{sζ}/Z with s ≤ t: half its range, or its parts."""
        kept = self.__dict__.setdefault("_spreads", {})
        if time not in kept:
            local, moves, tilted, n = self.local, self.moves, self.at(time), self.local.n
            narrow, left = local.own_narrow
            own = row_norms(tilted.high, narrow) + left + local.a * local.shift + 4 * local.tilt
            steps = (self.alpha * moves).expand(n, n).masked_fill(torch.eye(n, dtype=torch.bool), 0.0)
            parts = moves * own + tilted.most(steps.square()).sqrt() + local.a * moves * tilted.most(moves.square()).sqrt()
            kept[time] = torch.minimum(self.half, (parts + 4 * local.eta) * MARGIN)
        return kept[time]

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
        wide = values.expand(self.local.n, self.local.n)
        wide = torch.where(self.local.seen, wide, torch.zeros_like(wide))
        by_size = self.swap * wide.amax(-1)
        by_square = self.relative * (self.local.p * wide.square()).sum(-1).sqrt()
        return torch.minimum(torch.minimum(by_size, by_square), self.carried(wide)) * MARGIN

    def most(self, values: Tensor) -> Tensor:
        """max Σ P'_k f_k over laws between `low` and `high`, for f ≥ 0 (n, n) or (n,)."""
        values = values.expand(self.local.n, self.local.n)
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
    factor = local.a * scores.moves
    return factor * (p * values.size * scores.drift).sum(-1), factor * values.spread * _drift(scores)


def _drift(scores: ScoreMoves) -> Tensor:
    return (scores.local.p * scores.drift.square()).sum(-1).sqrt()


def _beyond(shape: HeadShape, scores: ScoreMoves, rows: slice) -> list[Ellipsoid]:
    """The remainder of one head as ellipsoids, for some rows."""
    values, none = shape.folded, torch.zeros_like(scores.half)
    each, spread = _curved(values, scores)
    tail, third = _exponential_part(values, scores), _third(values, scores)
    short, light = each < spread, tail < third
    known = torch.where(short, each, none) + torch.where(light, tail, none)
    curved = torch.where(short, none, scores.local.a * scores.moves * _drift(scores))
    parts = [Covariances(scores.local.p, curved, values.spread, torch.ones_like(short))]
    for end, weight, bent in _bends(scores):
        wide, boxed = _spreads(values, scores, end)
        parts.append(Covariances(scores.at(end).high, torch.where(light, none, weight * bent), wide, boxed))
    return [shape.move(scores.shifted(scores.moves)[rows]), shape.within(known, parts, rows)]


def _bends(scores: ScoreMoves) -> list[tuple[float, float, Tensor]]:
    """Ends of pieces of [0, 1], their weights in ∫ (1 - t) dt, and at least sd((ζ - E_tζ)²) there."""
    found = []
    for station in range(1, STATIONS + 1):
        start, end = (station - 1) / STATIONS, station / STATIONS
        bent = torch.minimum(scores.half.square(), 2 * scores.half * scores.spread_at(end))  # E x⁴ ≤ (2M)² E x²
        found.append((end, (end - start) * (1 - (start + end) / 2), bent * MARGIN))
    return found


def _third(values: LocalValues, scores: ScoreMoves) -> Tensor:
    """|∫ (1 - t) κ_t(z, ζ, ζ) dt| over the laws P_t ∝ P e^{tζ}: κ_t ≤ sd_t(z) sd_t((ζ - E_tζ)²), the latter at most half the range squared.

    For a centered variable on [-A, B] with A + B = 2M and r = (A - B)/2, (x + A)(x - B)(x - r)² ≤ 0 bounds E x⁴, and then
    Var(x²) ≤ (2r² + M²)σ² + (M² - r²)r² - σ⁴ ≤ M⁴.
    """
    pieces = (weight * spread_at(values, scores, end) * bent for end, weight, bent in _bends(scores))
    return sum(pieces, torch.zeros_like(scores.half)) * MARGIN


def spread_at(values: LocalValues, scores: ScoreMoves, time: float) -> Tensor:
    """At least the standard deviation of Vᵀx in any direction under every law P e^{tζ}/Z."""
    return _spreads(values, scores, time)[0]


def _spreads(values: LocalValues, scores: ScoreMoves, time: float) -> tuple[Tensor, Tensor]:
    """The same, and where it is |[√high z]|."""
    kept = scores.__dict__.setdefault("_value_spreads", {})
    key = (id(values), time)
    if key not in kept:
        tilted = scores.at(time)
        boxed = row_norms(tilted.high, values.z) + values.w * values.local.shift
        others = torch.minimum(tilted.most(values.size.square()).sqrt(), values.half)
        kept[key] = torch.minimum(boxed, others) * MARGIN, boxed <= others
    return kept[key]


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
    if not bool((scores.moves > 0).any()):
        return mixed
    return scores.moves.square() / 2 * _own_curvature(values) + mixed


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
    total = torch.zeros_like(scores.half)
    for station in range(1, STATIONS + 1):
        time = station / STATIONS
        total = total + spread_at(values, scores, time) * scores.spread_at(time) / STATIONS
    tilted = total  # ∫ Cov_t(z, ζ) dt
    apart = values.w * scores.most(scores.moves) + torch.minimum(torch.minimum(carried, by_square), tilted)
    return torch.minimum(apart, scores.most(pushed(values, scores.moves))) * MARGIN  # u' - u = E'[z + Vᵀd]


def pushed(values: LocalValues, moves: Tensor) -> Tensor:
    """At least |z_ik + Vᵀd| over |d| ≤ ρ_k: √(μρ² + Σ_c z_c² μ/(μ - s_c²)) for any μ > s_max², z in the singular basis of V."""
    _, singular, basis = torch.linalg.svd(values.matrix, full_matrices=False)
    squares = (values.z @ basis.mT).square()
    outside = (values.z.square().sum(-1) - squares.sum(-1)).clamp_min(0.0)
    best = values.size + values.w * moves
    for factor in (1.003, 1.01, 1.03, 1.1, 1.2, 1.5, 2.0, 4.0, 16.0):
        level = factor * values.w**2
        stretched = (squares * (level / (level - singular.square()))).sum(-1) + outside
        best = torch.minimum(best, (stretched + level * moves.square()).sqrt() * MARGIN + 40 * values.w * values.local.shift)
    return best


STATIONS = 6
"""How many points of a path are looked at; the integrand grows along it, so each piece is bounded by its far end."""


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
    scores = [ScoreMoves(local, moves) for local in heads.heads]
    beyond = [_beyond(shape, score, rows) for shape, score in zip(head_shapes(heads), scores, strict=True)]
    plain = _added(heads, [sum((part.size + part.slack for part in parts), torch.zeros_like(moves[rows])) for parts in beyond])
    saturation = torch.minimum(_apart(heads, scores)[rows], _tilted(heads, scores, rows))
    if max(float(score.half[rows].max()) for score in scores) > 1:  # before, laws are far from saturated
        saturation = torch.minimum(saturation, _paired(heads, scores)[rows])
    return RowMoves(linear.ellipsoid(moves, rows), tuple(part for parts in beyond for part in parts), plain, saturation)


def _apart(heads: LocalHeads, scores: list[ScoreMoves]) -> Tensor:
    """Saturation of each head on its own; what rows themselves move by is added."""
    values = heads.separate if heads.folded is None else heads.folded
    each = [saturated(v, s) for v, s in zip(values, scores, strict=True)]
    return _added(heads, each) + (scores[0].moves if heads.residual else 0.0)


def _added(heads: LocalHeads, each: list[Tensor]) -> Tensor:
    """Bounds of what heads add to the output; heads that are not mixed are side by side."""
    return _number(heads.combined(each, None) if heads.folded is None else torch.stack(each).sum(0) * MARGIN)


def _number(values: Tensor) -> Tensor:
    """What is no number is no bound."""
    return torch.nan_to_num(values, nan=math.inf, posinf=math.inf)


def _tilted(heads: LocalHeads, scores: list[ScoreMoves], rows: slice) -> Tensor:
    """E'[Vᵀd] + ∫ Cov_t(z, ζ) dt of all heads together."""
    moves, parts = scores[0].moves, []
    for shape, score in zip(head_shapes(heads), scores, strict=True):
        times = [station / STATIONS for station in range(1, STATIONS + 1)]
        found = [(score.at(time).high, score.spread_at(time) / STATIONS, *_spreads(shape.folded, score, time)) for time in times]
        parts += [shape.move(score.most(moves)[rows]), shape.within(torch.zeros_like(moves), [Covariances(*one) for one in found], rows)]
    if heads.residual:
        parts.append(ball(moves[rows], heads.d))
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
    best = torch.full_like(moves, math.inf)
    if not math.isfinite(reach) or reach <= 0:
        return best
    still = torch.eye(len(spread), dtype=torch.float64)
    ahead = float(_quadratic_form(shapes, scores, still).sqrt().median()) / reach  # the best level for y along the largest move
    for part in (1.1, 0.7) if math.isfinite(ahead) else ():
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
