"""Matrices that are diagonal but for a few directions, F(I - UVᵀ): norm layers. Products take no d³.

With σ = Σ_p |u_p||v_p|, a product is off by at most γ max F (1 + σ)|x|, and F(I - UVᵀ)Q(I - VUᵀ)F, made of
Q - UZᵀ - ZUᵀ with Z = QV - U(VᵀQV)/2, by γ (max F)² (1 + σ)² |Q|_F.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper, relative_error, sizes


@dataclass(frozen=True)
class Update:
    """F(I - UVᵀ) of each token: F diagonal (n, d), U and V (n, d, p)."""

    scale: Tensor
    left: Tensor
    right: Tensor

    def __matmul__(self, x: Tensor) -> Tensor:
        """Of x (n, d, k)."""
        turned = torch.baddbmm(x, self.left, self.right.mT @ x, alpha=-1)
        return turned.mul_(self.scale.unsqueeze(-1))

    def push(self, shape: Tensor) -> Tensor:
        """M Q Mᵀ for symmetric Q (n, d, d)."""
        turned = shape @ self.right
        turned = turned - 0.5 * (self.left @ (self.right.mT @ turned))
        left, right = torch.cat([self.left, turned], -1), torch.cat([turned, self.left], -1)
        found = torch.baddbmm(shape, left, right.mT, alpha=-1)
        return found.mul_(self.scale.unsqueeze(-1)).mul_(self.scale.unsqueeze(-2))

    @cached_property
    def size(self) -> Upper:
        """At least max F (1 + σ)."""
        sigma = (computed_lengths(self.left.mT) * computed_lengths(self.right.mT)).sum(-1)
        return sizes(self.scale).amax(-1) * (1 + sigma)

    @property
    def dense(self) -> Tensor:
        """All of it, (n, d, d)."""
        n, width = self.scale.shape
        return self @ torch.eye(width, dtype=torch.float64).expand(n, -1, -1)


Map = Tensor | Update
"""A matrix for each token (n or 1, e, d)."""


def whole_of(matrix: Map) -> Tensor:
    """As a tensor."""
    return matrix.dense if isinstance(matrix, Update) else matrix


def product_size(matrix: Map) -> Upper:
    """At least what products with matrices are made of: they are off by at most γ times that."""
    return matrix.size if isinstance(matrix, Update) else computed_lengths(matrix.flatten(-2))


def product_roundings(matrix: Map) -> int:
    """How many roundings γ counts for one product."""
    return matrix.scale.shape[-1] + 8 if isinstance(matrix, Update) else matrix.shape[-1] + 4


def push_error(matrix: Map, size: Upper) -> Upper:
    """At least how far M Q Mᵀ may be off in Frobenius norm, for |Q|_F at most `size`."""
    roundings = 2 * product_roundings(matrix) + 8
    return relative_error(roundings) * product_size(matrix).square() * size
