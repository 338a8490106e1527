"""How far rows of heads can move at all, however large the moves of tokens: mass that changes places. Results are (n,)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.certify.near.ellipsoids import Covariances, HeadShape, ball, enclosed, gathered, head_shapes
from regard.certify.near.heads import LocalHeads, LocalValues
from regard.certify.near.matrix_norms import MARGIN, bounds
from regard.certify.near.score_moves import FEW, STATIONS, ScoreMoves, value_spreads


def saturation(heads: LocalHeads, scores: list[ScoreMoves]) -> Tensor:
    """At least |F_i(x') - F_i(x)| for each row, however large the moves."""
    found = torch.minimum(_apart(heads, scores), _tilted(heads, scores))
    if max(float(score.half.max()) for score in scores) > 1:  # before, laws are far from saturated
        found = torch.minimum(found, _paired(heads, scores))
    return found


def _apart(heads: LocalHeads, scores: list[ScoreMoves]) -> Tensor:
    """Saturation of each head on its own; what rows themselves move by is added."""
    values = heads.separate if heads.folded is None else heads.folded
    each = [saturated(v, s) for v, s in zip(values, scores, strict=True)]
    return heads.added(each) + (scores[0].turn if heads.residual else 0.0)


def saturated(values: LocalValues, scores: ScoreMoves) -> Tensor:
    """At least |u' - u| of each row however large the moves: mass that can change places, no exponential."""
    sizes = values.size
    carried = torch.minimum(scores.most(sizes), scores.carried(sizes))
    by_square = values.spread * scores.relative
    tilted = (value_spreads(values, scores)[0] * scores.spreads).sum(0) / STATIONS * MARGIN  # ∫ Cov_t(z, ζ) dt
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


def _tilted(heads: LocalHeads, scores: list[ScoreMoves]) -> Tensor:
    """E'[Vᵀd] + ∫ Cov_t(z, ζ) dt of all heads together."""
    moves, parts = scores[0].moves, []
    for shape, score in zip(head_shapes(heads), scores, strict=True):
        found = zip(score.highs, score.spreads / STATIONS, *value_spreads(shape.folded, score), strict=True)
        covariances = [Covariances(*one) for one in found]
        parts += [shape.move(score.most(moves)), shape.within(torch.zeros_like(score.half), covariances)]
    if heads.residual:
        parts.append(ball(scores[0].turn, heads.d))
    return bounds(gathered(parts))


def _paired(heads: LocalHeads, scores: list[ScoreMoves]) -> Tensor:
    """|y + g|² ≤ μ + yᵀ(I - D/μ)⁻¹y for g in the ellipsoid of D, the moves of values, μ > |D|; y = Σ_h E'[z_h] by pairs of heads."""
    shapes, moves = head_shapes(heads), scores[0].moves
    largest = torch.full((1,), float(moves.max()), dtype=torch.float64)
    parts = [shape.move(largest) for shape in shapes] + ([ball(largest, heads.d)] if heads.residual else [])
    found, matrices = enclosed(parts)
    reach, spread = float(found), matrices[0]
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
    return bounds(best)


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
