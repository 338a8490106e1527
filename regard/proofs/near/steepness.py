"""How steep rows of heads can be anywhere within the moves: the constants of rows in TokenMax norm.

Results are (rows,).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from regard._upper import Upper, exact, total
from regard.proofs.near.head import LocalValues
from regard.proofs.near.heads import LocalHeads
from regard.proofs.near.laws import Laws
from regard.proofs.near.linear import LinearMove
from regard.proofs.near.radii import STATIONS, TokenRadii


def row_constants(heads: LocalHeads, linear: LinearMove, scores: Sequence[TokenRadii]) -> Upper:
    """At least |J_i(x') e| of each row over |e_k| ≤ 1, anywhere within the moves: from the center,
    or as a whole.
    """
    tangents = torch.ones(heads.n, dtype=torch.float64)
    near = linear(tangents) + heads.combine(lambda values, h: _change(values, scores[h], exact(tangents)))
    whole = heads.combine(lambda values, h: _whole(values, scores[h]))
    return near.minimum(1 + whole if heads.residual else whole)


def derivative_change(heads: LocalHeads, scores: Sequence[TokenRadii], tangents: Upper) -> Upper:
    """At least |(J_i(x') - J_i(x)) e| of each row over |e_k| ≤ τ_k,
    anywhere within the moves of the scores.
    """
    return heads.combine(lambda values, h: _change(values, scores[h], tangents))


def _slope_spread(scores: TokenRadii, laws: Laws, tangents: Upper) -> Upper:
    """At least sd of the slope s_e of the scores along |e_k| ≤ τ_k, taken at the center,
    under laws that are part of the way.
    """
    local = scores.local
    elsewhere = ~torch.eye(local.n, dtype=torch.bool)
    steps = (local.alpha * tangents).where(elsewhere)
    return tangents * local.own_narrow.spreads(laws.high) + laws.most(steps.square()).sqrt()


def _drifts(values: LocalValues, scores: TokenRadii, tangents: Upper) -> tuple[Upper, Upper]:
    """At least sd'(d), and sd' of the slope's own change a (|e_i||d_k| + |d_i||e_k|)."""
    far = scores.laws.most(scores.moves.square()).sqrt()
    turned = tangents * far + scores.moves * scores.laws.most(tangents.square()).sqrt()
    return far, values.local.a * turned


def _change(values: LocalValues, scores: TokenRadii, tangents: Upper) -> Upper:
    """(E' - E)[Vᵀe] + {Cov'(z, s_e) - Cov(z, s_e)} + Cov'(Vᵀd, s'_e) + Cov'(z, s'_e - s_e) (N34).

    The bracket is ∫ κ_t(z, s_e, ζ) dt over the laws P_t ∝ P e^{tζ}, at most ∫ sd_t(z) 2M sd_t(s_e) dt.
    """
    wide = scores.value_spreads(values)[0]
    slopes = [_slope_spread(scores, scores.at(station), tangents) for station in range(1, STATIONS + 1)]
    pieces = total([wide[at] * slope for at, slope in enumerate(slopes)]) / STATIONS
    far, bend = _drifts(values, scores, tangents)
    turned = values.w * scores.total_change(tangents) + 2 * scores.half * pieces
    return turned + values.w * far * (slopes[-1] + bend) + wide[-1] * bend


def _whole(values: LocalValues, scores: TokenRadii) -> Upper:
    """E'[Vᵀe] + Cov'(z + Vᵀd, s'_e)."""
    tangents = exact(torch.ones_like(scores.moves.value))
    far, bend = _drifts(values, scores, tangents)
    wide = scores.value_spreads(values)[0][-1] + values.w * far
    return values.w + wide * (_slope_spread(scores, scores.laws, tangents) + bend)
