"""Bounds (n,) of how far rows of heads move that stay finite for any move of the tokens: total variation
times the diameter of the values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import UNIT, Lower, Upper, exact, relative_error, total
from regard.proofs.near.ellipsoids import Covariances, HeadShape, ball, enclose, length_of_sum
from regard.proofs.near.head import LocalValues
from regard.proofs.near.heads import LocalHeads
from regard.proofs.near.radii import FEW, STATIONS, TokenRadii

LEVELS = (1.003, 1.01, 1.03, 1.1, 1.2, 1.5, 2.0, 4.0, 16.0)
"""Multiples of |V|² that are tried as μ in (N20); any certifies."""


def saturation(heads: LocalHeads, scores: list[TokenRadii]) -> Upper:
    """At least |F_i(x') - F_i(x)| for each row, however large the moves."""
    found = _head_by_head(heads, scores).minimum(_along_path(heads, scores))
    if max(float(score.half.value.max()) for score in scores) > 1:  # before, laws are far from saturated
        found = found.minimum(_pair_by_pair(heads, scores))
    return found


def _head_by_head(heads: LocalHeads, scores: list[TokenRadii]) -> Upper:
    """Saturation of each head on its own; what rows themselves move by is added."""
    found = heads.add([row_saturation(v, s) for v, s in zip(heads.joined, scores, strict=True)])
    return found + scores[0].turn if heads.residual else found


def row_saturation(values: LocalValues, scores: TokenRadii) -> Upper:
    """At least |u' - u| of each row: u' - u = E'[Vᵀd] + (E' - E)[z], or E'[z + Vᵀd] as a whole,
    since E[z] = 0 (N19).
    """
    laws, size = scores.laws, values.size
    tilted = (scores.value_spreads(values)[0] * scores.spreads).sum(0) / STATIONS  # ∫ Cov_t(z, ζ) dt
    turned = laws.most(size).minimum(laws.total_change(size), values.spread * scores.relative, tilted)
    apart = values.w * laws.most(scores.moves) + turned
    return apart.minimum(laws.most(longest_move(values, scores.moves)))


def longest_move(values: LocalValues, moves: Upper) -> Upper:
    """At least |z_ik + Vᵀd| over |d| ≤ ρ_k (N20).

    |z + Vᵀd|² ≤ μρ² + Σ_c z_c² μ/(μ - s_c²) for any μ > s_max², with s_c the singular values of V and z_c the
    coordinates of z in its singular basis; outside of it s = 0. Taken for the computed V, within
    `matrix.error` of V, and its computed singular values.
    """
    basis, matrix = values.singular, values.matrix
    s = basis.singular
    backward = relative_error(
        64 * sum(matrix.center.shape)
    )  # of a singular value decomposition, relative to |V|_F; assumed, generous
    turned = values.z.error + backward * computed_lengths(values.z.center).amax()
    bent = matrix.error + backward * matrix.length
    best = values.size + values.w * moves
    for factor in LEVELS:
        level = factor * float(s.amax()) ** 2
        gain = Upper(level) / Lower(
            (level - s.square()).clamp_min(0.0), 1000
        )  # μ - s² ≥ 0.003 s² loses few digits
        stretched = (Upper(basis.inside, 2 * len(s) + 4) * gain).sum(-1) + basis.outside
        found = (stretched + Upper(level) * moves.square()).sqrt()
        best = best.minimum(found + turned * gain.amax().sqrt() + bent * moves)
    return best


def _along_path(heads: LocalHeads, scores: list[TokenRadii]) -> Upper:
    """E'[Vᵀd] + ∫ Cov_t(z, ζ) dt of all heads together."""
    moves, parts = scores[0].moves, []
    none = exact(torch.zeros_like(scores[0].half.value))
    for shape, score in zip(heads.shapes, scores, strict=True):
        spreads, boxed = score.value_spreads(shape.folded)
        found = zip(score.highs, score.spreads / STATIONS, spreads, boxed, strict=True)
        covariances = [Covariances(*one) for one in found]
        parts += [shape.move(score.laws.most(moves)), shape.within(none, none, covariances)]
    if heads.residual:
        parts.append(ball(scores[0].turn, heads.d))
    return length_of_sum(parts)


def _pair_by_pair(heads: LocalHeads, scores: list[TokenRadii]) -> Upper:
    """|y + g|² ≤ μ + yᵀ(I - D/μ)⁻¹y for g in the ellipsoid of D, the moves of values, and μ > |D|; y = Σ_h
    E'[z_h] by pairs of heads (N21).

    N = (I - D/μ)⁻¹ is computed and then proved: with residual R = N(I - D/μ) - I, |R| < 1, the true one is at
    most N + |R||N|/(1 - |R|) I. Every level μ ≥ 1.02 reach² is more than |D|.
    """
    shapes, moves = heads.shapes, scores[0].moves
    largest = moves.amax().unsqueeze(0)
    parts = [shape.move(largest) for shape in shapes] + ([ball(largest, heads.d)] if heads.residual else [])
    found = enclose(parts)
    reach, spread = (
        float(found.length),
        found.matrices[0] + float(found.blur) * torch.eye(len(found.matrices[0]), dtype=torch.float64),
    )
    nothing = Upper(torch.full_like(scores[0].half.value, math.inf))
    if not math.isfinite(reach) or reach <= 0:
        return nothing
    slack = total([part.slack for part in parts])
    missed = total([shape.separate.z.error * shape.mixing for shape in shapes])
    still = torch.eye(len(spread), dtype=torch.float64)
    ahead = (
        float(_quadratic_form(shapes, scores, still).value.sqrt().median()) / reach
    )  # the best level for y along the largest move
    best = nothing
    factors = (
        (0.6, 0.45) if len(nothing.value) <= FEW else (1.1, 0.7)
    )  # any level certifies; a median over many rows is below most of them
    for factor in factors if math.isfinite(ahead) else ():
        level = (1.02 + factor * ahead) * reach**2
        rounding = 8 * len(still) * UNIT * still  # the matrix as computed is that of a D which is no less
        inverse, error = _proved_inverse(still - rounding - spread / level)
        square = Upper(level) + _quadratic_form(shapes, scores, inverse + 2 * float(error) * still)
        best = best.minimum(square.sqrt() + slack + missed)
    return best


def _proved_inverse(matrix: Tensor) -> tuple[Tensor, Upper]:
    """An inverse N of a symmetric matrix, symmetric itself, and at least how far it is from the true one:
    |R||N|/(1 - |R|), R = NM - I.
    """
    inverse = torch.linalg.inv(matrix)
    inverse = 0.5 * (inverse + inverse.mT)
    eye = torch.eye(len(matrix), dtype=torch.float64)
    size = computed_lengths(inverse.flatten())
    rounding = relative_error(len(matrix) + 4) * (size * computed_lengths(matrix.flatten()) + 1)
    residual = computed_lengths((inverse @ matrix - eye).flatten()) + rounding
    return inverse, residual * size / (1 - residual)


def _quadratic_form(shapes: list[HeadShape], scores: list[TokenRadii], form: Tensor) -> Upper:
    """At least yᵀNy over the laws of all heads: E'[z_hᵀN z_h] for each, and 2 E'[z_hᵀN z_g] for each pair,
    for the computed z.
    """
    found = exact(torch.zeros_like(scores[0].half.value))
    size = computed_lengths(form.flatten())
    for h, (shape, score) in enumerate(zip(shapes, scores, strict=True)):
        left, z = shape.mixer @ form, shape.separate.z.center
        own = ((z @ (left @ shape.mixer.mT)) * z).sum(-1).clamp_min(0.0)
        terms = relative_error(4 * (z.shape[-1] + len(form)) + 16) * size
        worth = Upper(own) + terms * (shape.thickness * shape.separate.size).square()
        for g in range(h):
            other, seen = shapes[g], scores[g].local.seen
            pairs = (z @ (left @ other.mixer.mT)) @ other.separate.z.center.mT
            pairs = pairs if bool(seen.all()) else pairs.masked_fill(~seen.unsqueeze(1), -math.inf)
            rounding = (
                terms
                * shape.thickness
                * shape.separate.size
                * (other.thickness * other.separate.largest).unsqueeze(-1)
            )
            worth = worth + 2 * (Upper(pairs.amax(-1).clamp_min(0.0)) + rounding)
        found = found + score.laws.most(worth)
    return found
