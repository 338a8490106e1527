"""Sums and maxima over groups of numbers: `labels` (n,) say which of `count` groups each is in.

Vectors are columns, (d, n): with millions of them and few coordinates that is several times as fast as rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FEW = 8
"""So many coordinates are taken one at a time."""


def columns_of(points: Tensor) -> Tensor:
    """Points (n, d) as columns (d, n), side by side in memory."""
    return torch.stack(points.unbind(-1)) if 0 < points.shape[-1] <= FEW else points.mT.contiguous()


def sums_in(values: Tensor, labels: Tensor, count: int) -> Tensor:
    """Σ over each group, (n,) to (k,), or (d, n) to (d, k)."""
    if values.ndim == 1:
        return values.new_zeros(count).scatter_add_(0, labels, values)
    if len(values) <= FEW:
        return torch.stack([sums_in(row, labels, count) for row in values])
    return values.new_zeros(len(values), count).index_add_(1, labels, values)


def largest_in(values: Tensor, labels: Tensor, count: int, none: float = -math.inf) -> Tensor:
    """The largest of each group, (n,) to (k,)."""
    return values.new_full((count,), none).scatter_reduce_(0, labels, values, "amax")


def spread_out(values: Tensor, labels: Tensor) -> Tensor:
    """The number of its group at each place: (k,) to (n,), or (d, k) to (d, n)."""
    if values.ndim != 2 or len(values) > FEW:
        return values.index_select(-1, labels)
    found = values.new_empty(len(values), len(labels))
    for row, place in zip(values, found, strict=True):
        torch.index_select(row, 0, labels, out=place)
    return found


def squares(columns: Tensor) -> Tensor:
    """|v|² of columns (d, n)."""
    if not 0 < len(columns) <= FEW:
        return columns.square().sum(0)
    found = columns[0].square()
    for row in columns[1:]:
        found.addcmul_(row, row)
    return found


def away_from(centers: Tensor, columns: Tensor, labels: Tensor) -> Tensor:
    """What is left of columns (d, n) without the center (d, k) of their group."""
    found = spread_out(centers, labels)
    return torch.sub(columns, found, out=found)


def means_in(masses: Tensor | None, columns: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
    """Σ p_j v_j over each group, (d, k), of `sizes` (k,); masses: None where all of a group are the same."""
    if masses is not None:
        return sums_in(masses * columns, labels, len(sizes))
    return sums_in(columns, labels, len(sizes)) / sizes


def covariances(masses: Tensor | None, columns: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
    """Σ p_j v_j v_jᵀ over each group, (k, d, d), for few coordinates; masses: as above."""
    width, count = len(columns), len(sizes)
    found = columns.new_zeros(count, width, width)
    scaled, product = torch.empty_like(columns[0]), torch.empty_like(columns[0])
    for i, row in enumerate(columns):
        scaled = row if masses is None else torch.mul(masses, row, out=scaled)
        for j in range(i, width):
            torch.mul(scaled, columns[j], out=product)
            found[:, i, j] = found[:, j, i] = sums_in(product, labels, count)
    return found if masses is not None else found / sizes[:, None, None]
