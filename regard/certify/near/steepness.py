"""How steep rows of heads can be anywhere within the moves: the constants of rows in TokenMax norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.certify.near.heads import LocalHeads, LocalValues
from regard.certify.near.linear import LinearMove
from regard.certify.near.matrix_norms import MARGIN, bounds, row_norms
from regard.certify.near.score_moves import STATIONS, ScoreMoves, spread_at


def row_constants(heads: LocalHeads, linear: LinearMove, moves: Tensor) -> Tensor:
    """At least |J_i(x') e| of each row over |e_k| ≤ 1, anywhere within the moves: from the center, or as a whole."""
    scores = [ScoreMoves(local, moves) for local in heads.heads]
    tangents = torch.ones_like(moves)
    near = linear(tangents) + _together(heads, scores, lambda v, s: _change(v, s, tangents))
    return torch.minimum(near, (1.0 if heads.residual else 0.0) + _together(heads, scores, _whole)) * MARGIN


def derivative_change(heads: LocalHeads, moves: Tensor, tangents: Tensor) -> Tensor:
    """At least |(J_i(x') - J_i(x)) e| of each row over |e_k| ≤ τ_k, anywhere within the moves."""
    scores = [ScoreMoves(local, moves) for local in heads.heads]
    return _together(heads, scores, lambda v, s: _change(v, s, tangents))


def _together(heads: LocalHeads, scores: list[ScoreMoves], function: Callable[[LocalValues, ScoreMoves], Tensor]) -> Tensor:
    """A bound of each head, for both ways to combine them."""
    separate = [function(v, s) for v, s in zip(heads.separate, scores, strict=True)]
    folded = None if heads.folded is None else [function(v, s) for v, s in zip(heads.folded, scores, strict=True)]
    return bounds(heads.combined(separate, folded))


def _slope_spread(scores: ScoreMoves, time: float, tangents: Tensor) -> Tensor:
    """At least sd of the scores' slope along |e_k| ≤ τ_k, taken at the center, under laws that are part of the way."""
    local, tilted, n = scores.local, scores.at(time), scores.local.n
    narrow, left = local.own_narrow
    own = row_norms(tilted.high, narrow) + left + local.a * local.shift + 4 * local.tilt
    steps = (scores.alpha * tangents).expand(n, n).masked_fill(torch.eye(n, dtype=torch.bool), 0.0)
    return (tangents * own + tilted.most(steps.square()).sqrt()) * MARGIN


def _drifts(values: LocalValues, scores: ScoreMoves, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """At least sd'(d), and sd' of the slope's own change a (|e_i||d_k| + |d_i||e_k|)."""
    far = scores.most(scores.moves.square()).sqrt()
    return far, values.local.a * (tangents * far + scores.moves * scores.most(tangents.square()).sqrt())


def _change(values: LocalValues, scores: ScoreMoves, tangents: Tensor) -> Tensor:
    """(E' - E)[Vᵀe] + Cov'(z, s_e) - Cov(z, s_e) + Cov'(Vᵀd, s'_e) + Cov'(z, s'_e - s_e), the second by third cumulants along P e^{tζ}."""
    total = torch.zeros_like(scores.half)
    for station in range(1, STATIONS + 1):
        time = station / STATIONS
        total = total + spread_at(values, scores, time) * 2 * scores.half * _slope_spread(scores, time, tangents) / STATIONS
    far, bend = _drifts(values, scores, tangents)
    wide, slope = spread_at(values, scores, 1.0), _slope_spread(scores, 1.0, tangents)
    return (values.w * scores.shifted(tangents) + total + values.w * far * (slope + bend) + wide * bend) * MARGIN


def _whole(values: LocalValues, scores: ScoreMoves) -> Tensor:
    """E'[Vᵀe] + Cov'(z + Vᵀd, s'_e)."""
    tangents = torch.ones_like(scores.moves)
    far, bend = _drifts(values, scores, tangents)
    return (values.w + (spread_at(values, scores, 1.0) + values.w * far) * (_slope_spread(scores, 1.0, tangents) + bend)) * MARGIN
