"""One token j moves by δ, |δ| ≤ r: rows i ≠ j in closed form.

With θ_i = s_ij - log Σ_{k≠j} e^{s_ik}, Δ_i = x_j - E_i[x | not j], p(t) = σ(θ_i + t) and t_i = v_ij·δ, the
mean of row i moves by exactly

    u_i' - u_i = p(t_i) δ + (p(t_i) - p(0)) Δ_i.                                                         (N22)

All rows see the same δ, so if the squares of their moves are at most a_i + c_i t_i², together they are at
most

    Σ_i a_i + r² λ_max(Σ_i c_i v_i v_iᵀ).                                                                (N23)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import Numbers, Vectors, largest_roots, spectral_norms
from regard._upper import ELEMENTARY, UNIT, Lower, Upper, exact, relative_error, root, sizes, stack, total
from regard.proofs.near.head import LocalValues
from regard.proofs.near.heads import AT_ONCE, LocalHeads

CELLS = 160
CURVE = root(3) / 36
"""Half of the largest |σ''|, which is 1/(6√3) = √3/18."""
QUARTER = exact(0.25)
"""The largest σ'."""


class TokenMove:
    """The moves of all rows but j, of one head."""

    def __init__(self, values: LocalValues, token: int, radius: float) -> None:
        local = values.local
        self.values, self.radius = values, exact(radius)
        self.rows = torch.tensor(
            [i for i in range(local.n) if i != token and bool(local.seen[i, token])], dtype=torch.long
        )
        self.v: Vectors = local.by_key[self.rows, token if local.by_key.shape[1] > 1 else 0]
        center = local.odds.center[self.rows, token].clamp(-1e4, 1e4)
        self.theta = Numbers(center.unsqueeze(-1), local.odds.error)
        self.away = self._away(token)
        self.gap = self.away.times(values.matrix).lengths()
        self.reach = self.radius * self.v.lengths()
        grid = torch.logspace(-4, 0, CELLS, dtype=torch.float64)
        grid[-1] = 1.0
        steps = torch.cat([torch.zeros(1, dtype=torch.float64), grid])
        self.times = steps * self.reach.bound.unsqueeze(-1).clamp_min(
            1e-250
        )  # (rows, cells + 1), the last no less than the reach

    def _away(self, token: int) -> Vectors:
        """Δ_i; zero for a row that sees no other token, which moves with this one."""
        local = self.values.local
        others = local.log_law.center[self.rows].index_fill(1, torch.tensor([token]), -math.inf)
        away = torch.nan_to_num(local.x.center[token] - others.softmax(-1) @ local.x.center, nan=0.0)
        rounding = relative_error(2 * local.law_roundings + 2 * local.n + 2 * ELEMENTARY) * local.radius
        return Vectors(away, 2 * local.x.error + 2 * rounding)

    # p(t) and its changes, without cancellation: σ(θ + t) - σ(θ) = σ(θ + t) σ(-θ) (1 - e^{-t})

    @cached_property
    def start(self) -> Upper:
        """At least p(0), (rows, 1)."""
        return self.theta.logistic()

    @cached_property
    def slope(self) -> Upper:
        """At least p'(0) = σ(θ) σ(-θ)."""
        return self.start * self._opposite.logistic()

    @cached_property
    def _opposite(self) -> Numbers:
        return Numbers(-self.theta.center, self.theta.error)

    def _change(self, times: Tensor, rising: bool) -> Upper:
        """At least |p(±t) - p(0)| for t ≥ 0, (rows, times); it grows with t."""
        part = Upper(-torch.expm1(-times), ELEMENTARY)
        low, high = (self._opposite, self.theta) if rising else (self.theta, self._opposite)
        return low.logistic() * high.logistic(exact(times)) * part

    def _slowest(self, times: Tensor, rising: bool) -> Lower:
        """At most |p(±t) - p(0)|/t for t > 0."""
        low, high = (self._opposite, self.theta) if rising else (self.theta, self._opposite)
        there = high.center + times
        ahead = Numbers(there, high.error + Upper(UNIT) * sizes(there))
        part = Lower(-torch.expm1(-times), ELEMENTARY)
        return low.logistic_low() * ahead.logistic_low() * part / exact(times)

    def _whole(self, times: Tensor) -> Upper:
        """w p r + |p - p(0)| |VᵀΔ| for the worse of t and -t; it grows with t. p(-t) ≤ p(0)."""
        gap, w, r = self.gap.unsqueeze(-1), self.values.w, self.radius
        rising = w * self.theta.logistic(exact(times)) * r + self._change(times, True) * gap
        falling = w * self.start * r + self._change(times, False) * gap
        return rising.maximum(falling)

    def saturation(self) -> tuple[Upper, Upper]:
        """a and c with (w p(t) r + |p(t) - p(0)| |VᵀΔ|)² ≤ a + c t²: of several a, the one that costs least
        at a tenth of the reach.

        The left side grows with t, so on each cell its square at the right end is at most a + c t² at the
        left end.
        """
        left, last = self.times[:, :-1], self.times[:, -1].square().unsqueeze(-1)
        squares = self._whole(self.times).square()
        levels = squares.firm().map(lambda value: value[:, :: CELLS // 8])
        above = squares[:, 1:].unsqueeze(1) - Lower(levels.value).unsqueeze(-1)  # (rows, levels, cells)
        steep = above / Lower(left).square().unsqueeze(1)
        slopes = steep.where(above.value > 0).amax(-1)  # nothing over nothing, at the start, asks for nothing
        value = torch.where(
            torch.isfinite(slopes.value) & torch.isfinite(levels.value + slopes.value * last),
            slopes.value,
            math.inf,
        )
        best = (levels.value + 0.1 * value * last).argmin(-1, keepdim=True)

        def pick(found: Tensor) -> Tensor:
            return found.gather(-1, best).squeeze(-1)

        return levels.map(pick), Upper(value, slopes.roundings).map(pick)

    def curvature(self) -> Upper:
        """c with (w |p(t) - p(0)| r + |p(t) - p(0) - p'(0) t| |VᵀΔ|)² ≤ c t².

        On a cell: |p(t) - p(0)|/t is at most max σ' there and at most its value at the right end over the
        left t; the second part over t at most CURVE t, and at most its larger end value, and what it may grow
        in between, over the left t.
        """
        left, right = self.times[:, :-1], self.times[:, 1:]
        under, over = Lower(left), exact(right)
        steepest = QUARTER.minimum(self.slope + 2 * CURVE * over)
        best = exact(torch.zeros_like(self.theta.center[:, 0]))
        step = (over - under) * QUARTER.minimum(2 * CURVE * over)
        for rising in (True, False):
            moved = self._change(self.times, rising)
            bent = self._bent(moved)
            ends = bent[:, :-1].maximum(bent[:, 1:])
            bow = (CURVE * over).minimum((ends + step) / under)
            pace = steepest.minimum(moved[:, 1:] / under)
            best = best.maximum((self.values.w * pace * self.radius + bow * self.gap.unsqueeze(-1)).amax(-1))
        return best.square()

    def _bent(self, moved: Upper) -> Upper:
        """At least |p(±t) - p(0) ∓ p'(0) t| at the times.

        Both numbers are right to a factor, from rounding and from θ; the difference of the computed ones is
        off by that part of their sum.
        """
        straight = self.slope * exact(self.times)
        relative = relative_error(moved.roundings + straight.roundings) + self._factor
        return Upper((moved.value - straight.value).abs()) + 2 * relative * (moved + straight)

    @cached_property
    def _factor(self) -> Upper:
        """σ(θ + t) - σ(θ) and σ'(θ) change at most by e^{2e + 2f} - 1 when θ, known to e, is taken at its
        worst and θ + t is rounded, by f: σ''/σ' is at most one.

        The rounding is γ (|θ| + t + e). From t = 2|θ| + 2 on, σ'/σ ≤ e^{-t/2 - 1} makes less of it than γ, so
        f = γ (3|θ| + 3 + e) will do.
        """
        rounding = relative_error(self.theta.error.roundings + ELEMENTARY)
        size = 3 * (sizes(self.theta.center) + 1) + self.theta.error
        return (2 * (self.theta.error + rounding * size)).expm1()

    def ranges(self) -> tuple[tuple[Tensor, Upper], tuple[Tensor, Upper]]:
        """Middles and half widths of p(t) and of (p(t) - p(0))/t over |t| ≤ reach.

        The latter is the mean of σ' between θ and θ + t, so it is least at an end, and within CURVE ·
        (step/2) of the grid elsewhere.
        """
        reach = self.reach.bound
        low, high = (
            self.theta.logistic_low(exact(reach.unsqueeze(-1))),
            self.theta.logistic(exact(reach.unsqueeze(-1))),
        )
        steps = torch.linspace(0, 1, CELLS + 1, dtype=torch.float64) * reach.unsqueeze(-1).clamp_min(1e-250)
        tops, ends = [self.slope[:, 0]], []
        for rising in (True, False):
            tops.append((self._change(steps[:, 1:], rising) / Lower(steps[:, 1:])).amax(-1))
            ends.append(self._slowest(steps[:, -1:], rising)[:, 0])
        top = tops[0].maximum(*tops[1:]) + CURVE * self.reach / CELLS
        return _middle(low[:, 0], high[:, 0]), _middle(ends[0].minimum(ends[1]), top)

    def row_bounds(self, linear: Upper) -> Upper:
        """At least |u_i' - u_i| for each of the rows, alone: `linear` is |J_ij| of this head's values."""
        whole = self._whole(self.times[:, -1:])[:, 0]
        return whole.minimum(self.radius * linear + self.curvature().sqrt() * Upper(self.times[:, -1]))


def _middle(low: Lower, high: Upper) -> tuple[Tensor, Upper]:
    """A number between, and at least how far the true ones are from it."""
    middle = (low.bound + high.bound) / 2
    return middle, (high - Lower(middle)).maximum(Upper(middle) - low)


class OtherRows:
    """Bounds for all rows but that of the token, roots of sums of squares: beyond the linear part,
    and as a whole.
    """

    def __init__(self, heads: LocalHeads, token: int, radius: float) -> None:
        self._heads, self._radius = heads, exact(radius)
        self._separate = [TokenMove(values, token, radius) for values in heads.separate]
        self._folded = (
            None if heads.folded is None else [TokenMove(values, token, radius) for values in heads.folded]
        )

    @cached_property
    def remainder(self) -> Upper:
        """What is beyond the linear part."""
        return self._together(False)

    @cached_property
    def whole(self) -> Upper:
        """The move itself, however large."""
        return self._together(True).minimum(interval_bound(self._heads, self._separate, self._radius))

    def _together(self, whole: bool) -> Upper:
        found = self._heads.mixing * _root_of_squares(self._separate, self._radius, whole)
        if self._folded is None:
            return found
        return found.minimum(total([_root_of_squares([move], self._radius, whole) for move in self._folded]))


def interval_bound(heads: LocalHeads, moves: list[TokenMove], radius: Upper) -> Upper:
    """r (|M| + what is left): the numbers of p(t) I + σ(t) Δ vᵀ in the middle of their ranges, heads
    together, and half the ranges (N24).

    Where t ↦ (p(t) - p(0))/t =: σ(t), (N22) is [p(t) I + σ(t) Δ vᵀ] δ.
    """
    outputs = torch.stack([_output_matrix(heads, h) for h in range(len(moves))])  # (heads, d, e)
    weight = torch.zeros(heads.n, len(moves), dtype=torch.float64)
    turn = torch.zeros(heads.n, len(moves), outputs.shape[-1], dtype=torch.float64)
    slope = torch.zeros(heads.n, len(moves), heads.d, dtype=torch.float64)
    halves, lost = [], []
    for h, move in enumerate(moves):
        (p_mid, p_half), (s_mid, s_half) = move.ranges()
        weight[move.rows, h], slope[move.rows, h] = p_mid, move.v.center
        turn[move.rows, h] = s_mid.unsqueeze(-1) * (move.away.center @ outputs[h])
        halves.append(move.values.w * p_half.norm() + move.v.scaled_norm(s_half * move.gap))
        lost.append(_middle_errors(move, Upper(p_mid), Upper(s_mid), heads))
    flat, gram = outputs.mT.flatten(1), torch.zeros(heads.d, heads.d, dtype=torch.float64)
    some = max(1, AT_ONCE // max(1, flat.shape[-1]))
    for rows in torch.arange(heads.n).split(some):
        middle = (weight[rows] @ flat).unflatten(1, outputs.mT.shape[1:]) + turn[rows].mT @ slope[
            rows
        ]  # (rows, e, d)
        gram += middle.flatten(0, 1).mT @ middle.flatten(0, 1)
    norm = largest_roots(gram, heads.n * outputs.shape[-1] + heads.n) + total(lost)
    return radius * (norm + heads.mixing * stack(halves).norm(0))


def _middle_errors(move: TokenMove, weight: Upper, turn: Upper, heads: LocalHeads) -> Upper:
    """At least how far the computed rows p V + σ VᵀΔ vᵀ of one head are from true ones,
    in Frobenius norm over rows.
    """
    matrix = move.values.matrix
    steep, away = move.v.lengths(), move.away.lengths()
    thick = matrix.length * heads.mixing * root(heads.width)  # |W_O|_F ≤ √e |W_O|
    size = weight * thick + turn * thick * away * steep
    relative = relative_error(2 * heads.d + 2 * heads.width + len(heads.heads) + 16)
    factors = turn * matrix.norm * heads.mixing * (move.away.error * steep + away * move.v.error)
    known = matrix.error * heads.mixing * (weight + turn * away * steep)
    return (relative * size + factors + known).norm()


def _output_matrix(heads: LocalHeads, head: int) -> Tensor:
    """The matrix of a head to the whole output: heads that are not mixed are side by side."""
    matrix = heads.outputs[head]
    if heads.folded is not None:
        return matrix
    before = sum(other.shape[-1] for other in heads.outputs[:head])
    return torch.nn.functional.pad(matrix, (before, heads.width - before - matrix.shape[-1]))


def _root_of_squares(moves: list[TokenMove], radius: Upper, whole: bool) -> Upper:
    """√(Σ a + r² λ_max(Σ c v vᵀ)) over heads and rows, which all see the same δ (N23)."""
    constants, scaled, errors = [], [], []
    for move in moves:
        a, c = (
            move.saturation()
            if whole
            else (exact(torch.zeros(len(move.rows), dtype=torch.float64)), move.curvature())
        )
        weights = c.sqrt()
        constants.append(a.sum(-1))
        scaled.append(weights.bound.unsqueeze(-1) * move.v.center)
        errors.append((weights * move.v.error).norm())
    rows = torch.cat(scaled)
    if not bool(torch.isfinite(rows).all()):
        return Upper(math.inf)
    steep = spectral_norms(rows) if len(rows) else exact(0.0)
    steep = Upper(steep.value, steep.roundings + 1) + stack(errors).norm(0)
    return (total(constants) + radius.square() * steep.square()).sqrt()


@dataclass(frozen=True)
class ColumnNorms:
    """At least the norms of the column of blocks J_ij over all rows i, and over those of other tokens;
    `error`: what of it is rounding.
    """

    whole: Upper
    rest: Upper
    error: Upper


def column_norms(heads: LocalHeads, token: int) -> ColumnNorms:
    """Those of one token; the same for every radius."""
    moves = torch.zeros(heads.n, dtype=torch.float64)
    moves[token] = 1.0
    error, inner = heads.jacobian_error(moves).norm(), heads.n * heads.width
    mine, rest = heads.column_grams(token)
    whole, others = (largest_roots(gram, inner) + error for gram in (mine + rest, rest))
    return ColumnNorms(whole, others, error)
