"""One token j moves by δ, |δ| ≤ r: rows i ≠ j in closed form.

With θ_i = s_ij - log Σ_{k≠j} e^{s_ik}, Δ_i = x_j - E_i[x | not j], p(t) = σ(θ_i + t) and t_i = v_ij·δ, the mean of row i moves by exactly
p(t) δ + (p(t) - p(0)) Δ_i. All rows see the same δ, so Σ_i (a_i + c_i t_i²) ≤ Σ_i a_i + r² λ_max(Σ_i c_i v_i v_iᵀ).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.certify.near.heads import AT_ONCE, LocalHeads, LocalValues
from regard.certify.near.matrix_norms import MARGIN, largest_root, matrix_norms

CELLS = 160
CURVE = 1 / (12 * math.sqrt(3))
"""Half of the largest |σ''|."""


class TokenMove:
    """The moves of all rows but j, of one head."""

    def __init__(self, values: LocalValues, token: int, radius: float) -> None:
        local = values.local
        self.values, self.radius = values, radius
        self.rows = torch.tensor([i for i in range(local.n) if i != token and bool(local.seen[i, token])], dtype=torch.long)
        self.v = local.v[self.rows, token if local.v.shape[1] > 1 else 0]
        alpha = self.v.norm(dim=-1) * MARGIN + local.tilt
        self.theta = local.odds[self.rows, token].clamp(-1e4, 1e4)
        others = local.log_p[self.rows].index_fill(1, torch.tensor([token]), -math.inf)
        away = local.x[token] - others.softmax(-1) @ local.x
        self.away = torch.nan_to_num(away, nan=0.0)  # a row that sees no other token moves with this one
        slack = values.w * (local.shift + 4 * local.error * local.radius)
        self.gap = (self.away @ values.matrix).norm(dim=-1) * MARGIN + slack
        self.reach = radius * alpha * MARGIN + 4 * local.eta
        self.weight = torch.sigmoid(self.theta)
        grid = torch.logspace(-4, 0, CELLS, dtype=torch.float64)
        self.times = torch.cat([torch.zeros(1, dtype=torch.float64), grid]) * self.reach.unsqueeze(-1).clamp_min(
            1e-300
        )  # (rows, cells + 1)

    def saturated(self) -> tuple[Tensor, Tensor]:
        """a and c with (w p(t) r + |p(t) - p(0)| |VᵀΔ|)² ≤ a + c t²: of several a, the one that costs least at a tenth of the reach."""
        left, last = self.times[:, :-1], self.times[:, -1].square().unsqueeze(-1)
        squares = self._whole(self.times).square()
        levels = squares[:, :: CELLS // 8]
        above = (squares[:, None, 1:] - levels.unsqueeze(-1)).clamp_min(0.0)  # (rows, levels, cells)
        slope = torch.where(above > 0, above / left.clamp_min(1e-300).square().unsqueeze(1), torch.zeros_like(above)).amax(-1)
        slope = torch.where(torch.isfinite(slope) & torch.isfinite(levels + slope * last), slope, torch.full_like(slope, math.inf))
        best = (levels + 0.1 * slope * last).argmin(-1, keepdim=True)
        return levels.gather(-1, best).squeeze(-1) * MARGIN, slope.gather(-1, best).squeeze(-1) * MARGIN

    def _whole(self, times: Tensor) -> Tensor:
        """w p r + |p - p(0)| |VᵀΔ| for the worse of t and -t; grows with t."""
        theta, start = self.theta.unsqueeze(-1), self.weight.unsqueeze(-1)
        up, down = torch.sigmoid(theta + times), torch.sigmoid(theta - times)
        gap = self.gap.unsqueeze(-1)
        rising = self.values.w * up * self.radius + (up - start) * gap
        falling = self.values.w * start * self.radius + (start - down) * gap  # p(-t) ≤ p(0)
        return torch.maximum(rising, falling) * MARGIN

    def curved(self) -> Tensor:
        """c with (w |p(t) - p(0)| r + |p(t) - p(0) - p'(0) t| |VᵀΔ|)² ≤ c t²."""
        theta, start = self.theta.unsqueeze(-1), self.weight.unsqueeze(-1)
        slope = start * torch.sigmoid(-theta)
        left, right = self.times[:, :-1], self.times[:, 1:]
        best = torch.zeros_like(self.theta)
        for sign in (1.0, -1.0):
            moved = torch.sigmoid(theta + sign * self.times) - start
            bent = (moved - sign * slope * self.times).abs()
            step = (right - left) * torch.minimum(torch.full_like(right, 0.25), 2 * CURVE * right)
            bow = torch.minimum(CURVE * right, (torch.maximum(bent[:, :-1], bent[:, 1:]) + step) / left.clamp_min(1e-300))
            steepest = torch.minimum(torch.full_like(right, 0.25), slope + 2 * CURVE * right)
            pace = torch.minimum(steepest, moved[:, 1:].abs() / left.clamp_min(1e-300))
            best = torch.maximum(best, (self.values.w * pace * self.radius + bow * self.gap.unsqueeze(-1)).amax(-1))
        return best.square() * MARGIN

    def ranges(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Middles and half widths of p(t) and of (p(t) - p(0))/t over |t| ≤ reach."""
        theta, start = self.theta.unsqueeze(-1), self.weight.unsqueeze(-1)
        low, high = torch.sigmoid(self.theta - self.reach), torch.sigmoid(self.theta + self.reach)
        steps = torch.linspace(-1, 1, 2 * CELLS + 1, dtype=torch.float64) * self.reach.unsqueeze(-1)
        bell = start * torch.sigmoid(-theta)
        safe = torch.where(steps.abs() > 1e-6, steps, torch.ones_like(steps))
        slope = torch.where(steps.abs() > 1e-6, (torch.sigmoid(theta + steps) - start) / safe, bell)
        slack = CURVE * self.reach / CELLS + 1e-6 + 1e-9
        top, bottom = slope.amax(-1) + slack, torch.minimum(slope[:, 0], slope[:, -1]) - 1e-9
        return ((low + high) / 2, (high - low) / 2 * MARGIN), ((top + bottom) / 2, (top - bottom) / 2 * MARGIN)

    def row_bounds(self, linear: Tensor) -> Tensor:
        """At least |u_i' - u_i| for each of the rows, alone: `linear` is |J_ij| of this head's values."""
        whole = self._whole(self.times[:, -1:]).squeeze(-1)
        return torch.minimum(whole, self.radius * linear + self.curved().sqrt() * self.reach) * MARGIN


class RestMoves:
    """Bounds for all rows but that of the token, roots of sums of squares: beyond the linear part, and as a whole."""

    def __init__(self, heads: LocalHeads, token: int, radius: float) -> None:
        self._heads, self._token, self._radius = heads, token, radius
        self._separate = [TokenMove(values, token, radius) for values in heads.separate]
        self._folded = None if heads.folded is None else [TokenMove(values, token, radius) for values in heads.folded]

    @cached_property
    def remainder(self) -> float:
        """What is beyond the linear part."""
        return self._together(False) * MARGIN

    @cached_property
    def whole(self) -> float:
        """The move itself, however large."""
        return min(self._together(True), _interval(self._heads, self._separate, self._token, self._radius)) * MARGIN

    def _together(self, whole: bool) -> float:
        found = self._heads.subject.mixing * _root(self._separate, self._radius, whole)
        return found if self._folded is None else min(found, sum(_root([move], self._radius, whole) for move in self._folded))


def _interval(heads: LocalHeads, moves: list[TokenMove], token: int, radius: float) -> float:
    """r (|M| + what is left): the numbers of p(t) I + σ(t) Δ vᵀ in the middle of their ranges, heads together, and half the ranges."""
    heads_of = range(len(moves))
    outputs = torch.stack([_padded(heads, h) for h in heads_of])  # (heads, d, e)
    weight = torch.zeros(heads.n, len(moves), dtype=torch.float64)
    turn = torch.zeros(heads.n, len(moves), outputs.shape[-1], dtype=torch.float64)
    slope = torch.zeros(heads.n, len(moves), heads.d, dtype=torch.float64)
    squares = 0.0
    for h, move in enumerate(moves):
        (p_mid, p_half), (s_mid, s_half) = move.ranges()
        weight[move.rows, h], slope[move.rows, h] = p_mid, move.v
        turn[move.rows, h] = s_mid.unsqueeze(-1) * (move.away @ outputs[h])
        turned = (s_half * move.gap).unsqueeze(-1) * move.v
        tilt = move.values.local.tilt
        left = move.values.w * float(p_half.norm()) + float(matrix_norms(turned)) + float((s_half * move.gap).norm()) * tilt
        squares += left * left
    flat, gram = outputs.mT.flatten(1), torch.zeros(heads.d, heads.d, dtype=torch.float64)
    some = max(1, AT_ONCE // max(1, flat.shape[-1]))
    for rows in torch.arange(heads.n).split(some):
        middle = (weight[rows] @ flat).unflatten(1, outputs.mT.shape[1:]) + turn[rows].mT @ slope[rows]  # (rows, e, d)
        gram += middle.flatten(0, 1).mT @ middle.flatten(0, 1)
    norm = float(largest_root(gram, heads.n * outputs.shape[-1])) + 1e-12 * float(gram.diagonal().sum().sqrt())
    return radius * (norm + heads.subject.mixing * math.sqrt(squares)) * MARGIN


def _padded(heads: LocalHeads, head: int) -> Tensor:
    """The matrix of a head to the whole output: heads that are not mixed are side by side."""
    chosen = heads.subject.separate if heads.subject.folded is None else heads.subject.folded
    matrix = chosen[head].matrix(heads.d)
    if heads.subject.folded is not None:
        return matrix
    before = sum(other.matrix(heads.d).shape[-1] for other in chosen[:head])
    return torch.nn.functional.pad(matrix, (before, heads.width - before - matrix.shape[-1]))


def _root(moves: list[TokenMove], radius: float, whole: bool) -> float:
    """√(Σ a + r² λ_max(Σ c v vᵀ)) over heads and rows, which all see the same δ."""
    total, extra = 0.0, 0.0
    scaled: list[Tensor] = []
    for move in moves:
        a, c = move.saturated() if whole else (torch.zeros_like(move.theta), move.curved())
        total += float(a.sum())
        tilt = move.values.local.tilt
        scaled.append(move.v * c.sqrt().unsqueeze(-1))
        extra += float((c * (2 * tilt * move.v.norm(dim=-1) + tilt * tilt)).sum())
    rows = torch.cat(scaled)
    if not math.isfinite(total + extra) or not bool(torch.isfinite(rows).all()):
        return math.inf
    return math.sqrt(total + radius**2 * (float(matrix_norms(rows)) ** 2 + extra)) * MARGIN


@dataclass(frozen=True)
class ColumnNorms:
    """At least the norms of the column of blocks J_ij over all rows i, and over those of other tokens; `error`: what of it is rounding."""

    whole: float
    rest: float
    error: float


def column_norms(heads: LocalHeads, token: int) -> ColumnNorms:
    """Those of one token; the same for every radius."""
    kept = heads.__dict__.setdefault("_stacked", {})
    if token not in kept:
        moves = torch.zeros(heads.n, dtype=torch.float64)
        moves[token] = 1.0
        error, inner = float(heads.jacobian_error(moves).norm()), heads.n * heads.width
        mine, rest = heads.column_grams(token)
        whole, others = (float(largest_root(gram, inner)) + error for gram in (mine + rest, rest))
        kept[token] = ColumnNorms(whole, others, error)
    return kept[token]
