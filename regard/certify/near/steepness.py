"""How steep rows of heads can be anywhere within the moves: the constants of rows in TokenMax norm."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.certify.near.heads import MARGIN, LocalHeads, LocalValues, row_norms
from regard.certify.near.linear import LinearMove
from regard.certify.near.moves import STATIONS, ScoreMoves, spread_at, together


def row_constants(heads: LocalHeads, linear: LinearMove, moves: Tensor) -> Tensor:
    """At least |J_i(x') e| of each row over |e_k| ≤ 1, anywhere within the moves: from the center, or as a whole."""
    scores = [ScoreMoves(local, moves) for local in heads.heads]
    near = linear(torch.ones_like(moves)) + together(heads, scores, _constant_change)
    return torch.minimum(near, (1.0 if heads.residual else 0.0) + together(heads, scores, _constant_whole)) * MARGIN


def _unit_spread(scores: ScoreMoves, time: float) -> Tensor:
    """At least sd of the scores' slope along |e_k| ≤ 1, taken at the center, under laws that are part of the way."""
    local, tilted, n = scores.local, scores.at(time), scores.local.n
    narrow, left = local.own_narrow
    own = row_norms(tilted.high, narrow) + left + local.a * local.shift + 4 * local.tilt
    steps = scores.alpha.expand(n, n).masked_fill(torch.eye(n, dtype=torch.bool), 0.0)
    return (own + tilted.most(steps.square()).sqrt()) * MARGIN


def _drifts(values: LocalValues, scores: ScoreMoves) -> tuple[Tensor, Tensor]:
    """At least sd'(d), and sd' of the slope's own change a (|e_i||d_k| + |d_i||e_k|)."""
    far = scores.most(scores.moves.square()).sqrt()
    return far, values.local.a * (far + scores.moves)


def _constant_change(values: LocalValues, scores: ScoreMoves) -> Tensor:
    """(E' - E)[Vᵀe] + Cov'(z, s_e) - Cov(z, s_e) + Cov'(Vᵀd, s'_e) + Cov'(z, s'_e - s_e), the second by third cumulants along P e^{tζ}."""
    total = torch.zeros_like(scores.half)
    for station in range(1, STATIONS + 1):
        time = station / STATIONS
        total = total + spread_at(values, scores, time) * 2 * scores.half * _unit_spread(scores, time) / STATIONS
    far, bend = _drifts(values, scores)
    wide, slope = spread_at(values, scores, 1.0), _unit_spread(scores, 1.0)
    return (values.w * scores.swap + total + values.w * far * (slope + bend) + wide * bend) * MARGIN


def _constant_whole(values: LocalValues, scores: ScoreMoves) -> Tensor:
    """E'[Vᵀe] + Cov'(z + Vᵀd, s'_e)."""
    far, bend = _drifts(values, scores)
    return (values.w + (spread_at(values, scores, 1.0) + values.w * far) * (_unit_spread(scores, 1.0) + bend)) * MARGIN
