"""Potentials that are inner products: scaled dot product, the general bilinear form, the cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard import _check
from regard._types import Features, Scalar, over_scores
from regard.errors import ArgumentError
from regard.parameters import Tokens, number, parameter, projection
from regard.potentials.base import Potential, project_both


@dataclass(frozen=True, eq=False, repr=False)
class Dot(Potential):
    """a(x, y) = scale · (w_qᵀx + b_q)·(w_kᵀy + b_k); scale None is 1/√c (vaswani2017, 3.2.1).

    Examples:
        >>> regard.Dot().scores(torch.ones(1, 4), torch.ones(2, 4)).tolist()  # 4 / √4
        [[2.0, 2.0]]
    """

    w_q: Tensor | None = projection(Tokens.QUERIES, default=None)
    w_k: Tensor | None = projection(Tokens.KEYS, default=None)
    scale: Scalar | None = number(default=None)
    b_q: Tensor | None = parameter(rank=1, default=None)
    b_k: Tensor | None = parameter(rank=1, default=None)
    positional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check.projections(self.w_q, self.w_k, self.b_q, self.b_k)
        _check.number("scale", self.scale)

    def factor(self, width: int) -> Scalar:
        """The scale, 1/√c where none is given."""
        return 1 / math.sqrt(max(width, 1)) if self.scale is None else self.scale

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        return project_both(x, y, self.w_q, self.w_k, self.b_q, self.b_k)

    def pair(self, queries: Features, keys: Features) -> Tensor:
        return (queries * over_scores(self.factor(queries.shape[-1]))) @ keys.mT


@dataclass(frozen=True, eq=False, repr=False)
class Bilinear(Potential):
    """a(x, y) = xᵀ a y: the general multiplicative score (luong2015, 3.1).

    Examples:
        >>> form = regard.Bilinear(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
        >>> float(form.scores(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]])))
        6.0
    """

    a: Tensor = parameter(rank=2, widths=(Tokens.QUERIES, Tokens.KEYS))
    positional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check.parameter("a", self.a, 2, "(..., d, d)")

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        if (x.shape[-1], y.shape[-1]) != self.a.shape[-2:]:
            raise ArgumentError(
                "a",
                f"is {list(self.a.shape)} for queries of width {x.shape[-1]} and keys of width {y.shape[-1]}",
                "give a (..., d_query, d_key)",
            )
        return x @ self.a, y

    def pair(self, queries: Features, keys: Features) -> Tensor:
        return queries @ keys.mT


@dataclass(frozen=True, eq=False, repr=False)
class Cosine(Potential):
    """a(x, y) = scale · q̂·k̂ with ẑ = z/√(|z|² + eps), q and k the projected points (qi2023, 3.2).

    Examples:
        >>> x = torch.tensor([[3.0, 0.0]])
        >>> round(float(regard.Cosine(scale=2.0).scores(x, 5 * x)), 5)
        2.0
    """

    w_q: Tensor | None = projection(Tokens.QUERIES, default=None)
    w_k: Tensor | None = projection(Tokens.KEYS, default=None)
    scale: Scalar = number(default=1.0)
    eps: float = 1e-6
    b_q: Tensor | None = parameter(rank=1, default=None)
    b_k: Tensor | None = parameter(rank=1, default=None)
    positional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check.projections(self.w_q, self.w_k, self.b_q, self.b_k)
        _check.number("scale", self.scale)
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ArgumentError(
                "eps", f"is {self.eps}", "give a positive number: it keeps the score smooth at zero"
            )

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        queries, keys = project_both(x, y, self.w_q, self.w_k, self.b_q, self.b_k)
        return self.normalized(queries), self.normalized(keys)

    def normalized(self, z: Tensor) -> Tensor:
        """z/√(|z|² + eps) for each row."""
        z = z.to(torch.promote_types(z.dtype, torch.float32))  # squares leave the range of half precision
        return z * (z.square().sum(-1, keepdim=True) + self.eps).rsqrt()

    def pair(self, queries: Features, keys: Features) -> Tensor:
        return (queries * over_scores(self.scale)) @ keys.mT
