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


def each(matrix: Tensor, x: Tensor) -> Tensor:
    """The products of one matrix (e, d) with those of all tokens (n, d, k), without a copy of it for each."""
    found = x.new_empty(len(x), len(matrix), x.shape[-1])
    for one, out in zip(x, found, strict=True):
        torch.mm(matrix, one, out=out)
    return found


def lower_products(
    first: Tensor, second: Tensor, width: int, diagonal: bool = True, factor: float = 1.0
) -> Tensor:
    """The rows of one with those of another, times a factor, on and below the diagonal of blocks, or below
    it.
    """
    size = len(first)
    found = first.new_zeros(size, size)
    for i in range(0, size, width) if first.shape[-1] else ():
        end = i + width if diagonal else i
        products = first[i : i + width] @ second[:end].mT
        found[i : i + width, :end] = products if factor == 1.0 else factor * products
    return found


HALF, BROAD = 128, 256
"""How wide blocks of half a symmetric matrix are, and from how many rows and columns on it is worth it."""


def half_products(square: Tensor, columns: Tensor) -> Tensor:
    """LX for the half L of a symmetric matrix (d, d) = L + Lᵀ: blocks below its diagonal, and half of those
    on it. So xᵀQx = 2xᵀLx, for two thirds of the work.
    """
    size = len(square)
    if min(size, columns.shape[-1]) < BROAD:
        return 0.5 * (square @ columns)
    found = columns.new_empty(size, columns.shape[-1])
    for a in range(0, size, HALF):
        rows = square[a : a + HALF, : a + HALF].clone()
        rows[:, a:] *= 0.5
        torch.mm(rows, columns[: a + HALF], out=found[a : a + HALF])
    return found


NARROW, CUTS, SHORT = 128, 6, 1024
"""How wide blocks of symmetric products are at least, how many there are at most, and how many columns it
takes that they are less work than everything at once.
"""


def symmetric_products(first: Tensor, second: Tensor) -> Tensor:
    """XYᵀ of (n, a, k) each where it is symmetric, by its blocks on and below the diagonal."""
    size = first.shape[-2]
    if first.shape[-1] < SHORT:
        return first @ second.mT
    width = max(NARROW, -(-size // CUTS))
    found = torch.stack([lower_products(x, y, width) for x, y in zip(first, second, strict=True)])
    for i in range(width, size, width):
        found[:, :i, i : i + width] = found[:, i : i + width, :i].mT
    return found


Map = Tensor | Update
"""A matrix for each token (n or 1, e, d)."""


def whole_of(matrix: Map) -> Tensor:
    """As a tensor."""
    return matrix.dense if isinstance(matrix, Update) else matrix


def product_size(matrix: Map) -> Upper:
    """At least what products with matrices are made of: they are off by at most γ times that."""
    return matrix.size if isinstance(matrix, Update) else matrix_sizes(matrix)


def matrix_sizes(matrices: Tensor) -> Upper:
    """At least |M|_F of matrices (..., a, b), without a copy of those that are stored by columns."""
    return computed_lengths((matrices.mT if matrices.mT.is_contiguous() else matrices).flatten(-2))


def product_roundings(matrix: Map) -> int:
    """How many roundings γ counts for one product."""
    return matrix.scale.shape[-1] + 8 if isinstance(matrix, Update) else matrix.shape[-1] + 4


def push_error(matrix: Map, size: Upper) -> Upper:
    """At least how far M Q Mᵀ may be off in Frobenius norm, for |Q|_F at most `size`."""
    roundings = 2 * product_roundings(matrix) + 8
    return relative_error(roundings) * product_size(matrix).square() * size
