"""The shape legend: one letter, one meaning, in every docstring and comment.

    ...   batch dimensions, heads included; they broadcast
    m     queries          n   keys (atoms of the context)
    d     width of points  c   width of projected features    e   width of values

    points (..., n, d)   log_weights (..., n)   marks (..., n)   scores (..., m, n)   outputs (..., m, e)

A *scalar parameter* (scale, bandwidth, temperature, slope, cap) is a number, or a tensor with one entry for
each batch element or head: a tensor of shape (h,) acts on scores of shape (h, m, n).
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor

Scalar: TypeAlias = float | Tensor
Features: TypeAlias = Any
"""A pytree of tensors (..., n, c): what a potential keeps of each token, so that pairs need nothing else."""


def over_scores(value: Scalar) -> Scalar:
    """A scalar parameter, shaped to act on scores (..., m, n)."""
    return value[..., None, None] if isinstance(value, Tensor) else value


def over_rows(value: Scalar) -> Scalar:
    """A scalar parameter, shaped to act on one number a token (..., n)."""
    return value.unsqueeze(-1) if isinstance(value, Tensor) else value
