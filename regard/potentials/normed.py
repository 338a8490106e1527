"""Dot products of queries and keys that pass a norm layer first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regard import _check
from regard._types import Features, Scalar, over_scores
from regard.errors import ArgumentError
from regard.normed import Normed
from regard.parameters import Tokens, number, parameter, part, projection
from regard.potentials.base import Potential, project


@dataclass(frozen=True, eq=False, repr=False)
class NormedDot(Potential):
    """a(x, y) = scale · N_q(w_qᵀx + b_q)·N_k(w_kᵀy + b_k) with N_q = query and N_k = key, each a norm
    layer or None for nothing; scale None is 1/√c (henry2020).

    After a norm no score exceeds a number that the weights say, whatever the tokens are. A norm over the
    projections of all heads is one with w_q for all of them and `u` that takes the columns of each.

    Examples:
        >>> from regard.normed import Normed
        >>> score = regard.NormedDot(query=Normed(), key=Normed())  # a norm layer on queries and on keys
        >>> score.scores(torch.randn(2, 4), torch.randn(3, 4)).abs().max() <= 2.001  # at most √4
        tensor(True)
    """

    w_q: Tensor | None = projection(Tokens.QUERIES, default=None)
    w_k: Tensor | None = projection(Tokens.KEYS, default=None)
    scale: Scalar | None = number(default=None)
    b_q: Tensor | None = parameter(rank=1, default=None)
    b_k: Tensor | None = parameter(rank=1, default=None)
    query: Normed | None = part(default=None)
    key: Normed | None = part(default=None)
    positional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check.number("scale", self.scale)
        for name, w, b, norm in (
            ("query", self.w_q, self.b_q, self.query),
            ("key", self.w_k, self.b_k, self.key),
        ):
            _check.parameter(f"w_{name[0]}", w, 2, "(..., d, r)")
            _check.parameter(f"b_{name[0]}", b, 1, "(..., r)")
            if not isinstance(norm, (Normed, type(None))):
                raise ArgumentError(name, f"is a {type(norm).__name__}", "give a Normed, or None for no norm")

    def factor(self, width: int) -> Scalar:
        """The scale, 1/√c where none is given."""
        return 1 / math.sqrt(max(width, 1)) if self.scale is None else self.scale

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        queries, keys = project("q", x, self.w_q, self.b_q), project("k", y, self.w_k, self.b_k)
        queries = queries if self.query is None else self.query(queries)
        keys = keys if self.key is None else self.key(keys)
        if queries.shape[-1] != keys.shape[-1]:
            raise ArgumentError(
                "query and key",
                f"give widths {queries.shape[-1]} and {keys.shape[-1]}",
                "give projections and norms that end in one width",
            )
        return queries, keys

    def pair(self, queries: Features, keys: Features) -> Tensor:
        return (queries * over_scores(self.factor(queries.shape[-1]))) @ keys.mT
