"""projected: the affine velocity that is closest to that of sigmoid attention to a Gaussian law.

For scores xᵀAy and weights σ(s + b) the velocity is Γ(x) = V(E[σ(z)] m + E[σ'(z)] Sθ), θ = Aᵀx, with one
normal number z of mean θ·m + b and variance θᵀSθ (Stein's lemma). It is not affine, so the law does not stay
Gaussian; its mean and covariance move as under the affine field b + Mx that is closest to Γ in L²(N(m, S)):
M = E[DΓ(x)], b + Mm = E[Γ(x)]. That is the projection to Gaussian laws in the geometry of Bures and
Wasserstein.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

OUTER, INNER = (96, 40, 24), 128
"""Nodes on each axis for x in one, two and three dimensions, and for z: three digits where scores vary by
five, and many more where they vary less.
"""
AXES = len(OUTER)
"""No quadrature in more dimensions."""


class Field(NamedTuple):
    """E[Γ(x)] (d,) and E[DΓ(x)] (d, d)."""

    value: Tensor
    slope: Tensor


def project(a: Tensor, bias: float, mean: Tensor, root: Tensor) -> Field:
    """Means of Γ and of its derivative over x of the law N(mean, root rootᵀ), for V = 1."""
    points, weights = _grid(len(mean))
    x, covariance = mean + points @ root.mT, root @ root.mT
    theta = x @ a
    toward = theta @ covariance  # Sθ
    along = a @ mean
    level, spread = theta @ mean + bias, (theta * toward).sum(-1).clamp_min(0).sqrt()
    plain, first, second, third = _means(level, spread)
    value = plain.unsqueeze(-1) * mean + first.unsqueeze(-1) * toward
    by_plain = first.unsqueeze(-1) * along + second.unsqueeze(-1) * (toward @ a.mT)
    by_first = second.unsqueeze(-1) * along + third.unsqueeze(-1) * (toward @ a.mT)
    turned = torch.outer(mean, weights @ by_plain) + (weights.unsqueeze(-1) * toward).mT @ by_first
    return Field(weights @ value, turned + (weights @ first) * covariance @ a.mT)


def _means(level: Tensor, spread: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """E σ(z), E σ'(z), E σ''(z), E σ'''(z) for normal z, one for each entry."""
    nodes, weights = _rule(INNER)
    p = torch.sigmoid(level.unsqueeze(-1) + spread.unsqueeze(-1) * nodes)
    first = p * (1 - p)
    second = first * (1 - 2 * p)
    third = first * (1 - 6 * first)
    plain, one, two, three = (part @ weights for part in (p, first, second, third))
    return plain, one, two, three


def _grid(dimension: int) -> tuple[Tensor, Tensor]:
    """Points (q^d, d) and weights of normal numbers on every axis."""
    nodes, weights = _rule(OUTER[dimension - 1])
    if dimension == 1:
        return nodes.unsqueeze(-1), weights
    points = torch.cartesian_prod(*([nodes] * dimension))
    return points, torch.cartesian_prod(*([weights] * dimension)).prod(-1)


@cache
def _rule(count: int) -> tuple[Tensor, Tensor]:
    """Gauss–Hermite nodes and weights for the normal law: eigenvalues of the matrix of the recursion."""
    off = torch.arange(1, count, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    weights = vectors[0].square()
    return nodes, weights / math.fsum(weights.tolist())
