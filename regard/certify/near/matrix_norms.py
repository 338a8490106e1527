"""Norms of many matrices at once, from above: an eigenvalue in float64 with a margin over its error."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._round import EPS

MARGIN = 1 + 1e-10
"""What sums of positive terms and eigenvalues in float64 are multiplied by; their rounding is far smaller at sizes that fit in memory."""


def bounds(values: Tensor) -> Tensor:
    """What is no number is no bound."""
    return torch.nan_to_num(values, nan=math.inf, posinf=math.inf)


def sums_of_others(values: Tensor) -> Tensor:
    """Σ_{l≠k} v_l for each k (..., n), each summed by itself: taking v_k from the sum of all would lose what is small beside it."""
    return values @ (1 - torch.eye(values.shape[-1], dtype=values.dtype))


def row_norms(p: Tensor, vectors: Tensor) -> Tensor:
    """At least |[√p_k u_k]_k|₂ for each row of vectors (rows, n, e)."""
    scaled = vectors * p.clamp_min(0).sqrt().unsqueeze(-1)
    return matrix_norms(scaled)


def half_diameter(points: Tensor, seen: Tensor) -> Tensor:
    """At least half of the largest distance of points (1 or rows, n, e) among those that each row sees (Popoviciu's inequality)."""
    apart = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    both = seen.unsqueeze(-1) & seen.unsqueeze(-2)
    return torch.where(both, apart, torch.zeros_like(apart)).flatten(1).amax(-1) / 2 * MARGIN


def matrix_norms(matrices: Tensor) -> Tensor:
    """At least the spectral norm of each matrix (..., a, b), from the smaller Gram matrix with a margin."""
    a, b = matrices.shape[-2:]
    if b == 1 or a == 1:
        return matrices.flatten(-2).norm(dim=-1) * MARGIN
    gram = matrices @ matrices.mT if a <= b else matrices.mT @ matrices
    return largest_root(gram, max(a, b))


def largest_root(gram: Tensor, terms: int = 0) -> Tensor:
    """At least √λ_max of symmetric positive matrices (..., a, a); a backward stable eigenvalue with a margin above its error.

    terms: how many products were added for each entry of a Gram matrix AᵀA, whose rounding |A|_F² bounds.
    """
    if not gram.shape[-1]:
        return gram.new_zeros(gram.shape[:-2])
    finite = torch.isfinite(gram).flatten(-2).all(-1)
    gram = torch.where(finite[..., None, None], gram, torch.zeros_like(gram))
    scale = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)
    top = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0)
    return ((top + (8 * gram.shape[-1] + terms) * EPS * scale) * MARGIN).sqrt().masked_fill(~finite, math.inf)
