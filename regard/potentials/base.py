"""Potential: the log of the interaction G(x, y) between a query point and a key point,
with its small algebra.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard import _check
from regard._heads import match_key_heads, project_points
from regard._object import Object
from regard._types import Features, Scalar, over_scores
from regard.errors import ArgumentError
from regard.parameters import children, number, part, shared, walk, with_parts


class Potential(Object):
    """The score a(x, y) = log G(x, y). Two methods make a potential:

    `features` keeps of each token what pairs need (projections are taken once, not once a tile), and
    `pair` compares the features of some queries with those of some keys. Sums and scalar multiples are
    potentials.

    Examples:
        >>> city = regard.Potential.of(lambda x, y: -(x - y).abs().sum(-1))
        >>> city.scores(torch.zeros(1, 2), torch.ones(1, 2)).tolist()
        [[-2.0]]
    """

    positional: ClassVar[bool | None] = None
    """Whether it looks at marks, apart from the potentials it is made of; None does not say."""

    @abstractmethod
    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        """Per-token features of queries x (..., m, d) and keys y (..., n, d): two pytrees of tensors (...,
        tokens, c).
        """

    @abstractmethod
    def pair(self, queries: Features, keys: Features) -> Tensor:
        """Scores (..., m, n) from features."""

    def projections(
        self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor
    ) -> tuple[Features, Features]:
        """Features as points of one space, which may be rotated there."""
        return self.features(x, y, x_marks, y_marks)

    def width(self, queries: Features, keys: Features) -> int:
        """Numbers held for each pair while scores are computed: what a tile costs."""
        return 1

    def scores(
        self, x: Tensor, y: Tensor, x_marks: Tensor | None = None, y_marks: Tensor | None = None
    ) -> Tensor:
        """All scores (..., m, n), by the definition."""
        x_marks = torch.arange(x.shape[-2], device=x.device) if x_marks is None else x_marks
        y_marks = torch.arange(y.shape[-2], device=y.device) if y_marks is None else y_marks
        queries, keys = self.features(x, y, x_marks, y_marks)
        return self.pair(queries, match_key_heads(queries, keys))

    @staticmethod
    def of(function: Callable[..., Tensor], *parameters: Tensor) -> Potential:
        """A potential from a plain function of queries (..., m, 1, d), keys (..., 1, n, d) and the
        parameters; it returns (..., m, n).

        Tensors that are to be learned go in as parameters, so that every engine can see them.
        """
        return FunctionPotential(function, parameters)

    def __add__(self, other: Potential) -> Potential:
        if not isinstance(other, Potential):
            return NotImplemented
        return Sum(_terms(self) + _terms(other))

    def __radd__(self, other: object) -> Potential:
        return self if other == 0 else NotImplemented  # the start of the built-in sum

    def __mul__(self, factor: Scalar) -> Potential:
        if isinstance(factor, Potential):
            return NotImplemented
        return Scaled(self, factor)

    __rmul__ = __mul__

    def __neg__(self) -> Potential:
        return Scaled(self, -1.0)

    def __sub__(self, other: Potential) -> Potential:
        return self + (-other)


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Potential):
    """a(x, y) = Σ_t a_t(x, y).

    Examples:
        >>> x = torch.ones(2, 4)
        >>> both = regard.Dot() + regard.Alibi(0.5)
        >>> type(both) is regard.potentials.Sum, both.scores(x, x)[1].tolist()
        (True, [1.5, 2.0])
    """

    terms: tuple[Potential, ...] = part()
    positional: ClassVar[bool] = False

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        pairs = [term.features(x, y, x_marks, y_marks) for term in self.terms]
        return tuple(queries for queries, _ in pairs), tuple(keys for _, keys in pairs)

    def projections(
        self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor
    ) -> tuple[Features, Features]:
        pairs = [term.projections(x, y, x_marks, y_marks) for term in self.terms]
        return tuple(queries for queries, _ in pairs), tuple(keys for _, keys in pairs)

    def pair(self, queries: Features, keys: Features) -> Tensor:
        total = self.terms[0].pair(queries[0], keys[0])
        for term, q, k in zip(self.terms[1:], queries[1:], keys[1:], strict=True):
            total = total + term.pair(q, k)
        return total

    def width(self, queries: Features, keys: Features) -> int:
        return 1 + max(term.width(q, k) for term, q, k in zip(self.terms, queries, keys, strict=True))


@dataclass(frozen=True, eq=False, repr=False)
class Scaled(Potential):
    """a(x, y) = factor · a_0(x, y).

    Examples:
        >>> x, tripled = torch.ones(1, 4), 3 * regard.Dot()
        >>> type(tripled) is regard.potentials.Scaled, float(tripled.scores(x, x))
        (True, 6.0)
    """

    potential: Potential = part()
    factor: Scalar = number()
    positional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check.number("factor", self.factor)

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        return self.potential.features(x, y, x_marks, y_marks)

    def projections(
        self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor
    ) -> tuple[Features, Features]:
        return self.potential.projections(x, y, x_marks, y_marks)

    def pair(self, queries: Features, keys: Features) -> Tensor:
        return over_scores(self.factor) * self.potential.pair(queries, keys)

    def width(self, queries: Features, keys: Features) -> int:
        return self.potential.width(queries, keys)


@dataclass(frozen=True, eq=False, repr=False)
class FunctionPotential(Potential):
    """a(x, y) = f(x, y, *parameters) for a plain Python function that broadcasts: (..., m, 1, d), (..., 1,
    n, d) -> (..., m, n).

    Examples:
        >>> near = regard.Potential.of(lambda x, y: -(x - y).abs().sum(-1))
        >>> isinstance(near, regard.potentials.FunctionPotential)
        True
        >>> near.scores(torch.zeros(1, 2), torch.ones(1, 2)).tolist()
        [[-2.0]]
    """

    function: Callable[..., Tensor] = shared()
    parameters: tuple[Tensor, ...] = ()  # a function says nothing of what they are
    positional: ClassVar[bool] = False

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        return x, y

    def pair(self, queries: Features, keys: Features) -> Tensor:
        scores = self.function(queries.unsqueeze(-2), keys.unsqueeze(-3), *self.parameters)
        expected = (queries.shape[-2], keys.shape[-2])
        if not isinstance(scores, Tensor) or scores.shape[-2:] != expected:
            raise ArgumentError(
                "function",
                f"returned {_check.describe(scores)}",
                f"return one score for each pair: (..., {expected[0]}, {expected[1]})",
            )
        points = torch.broadcast_shapes(queries.shape[:-2], keys.shape[:-2])
        if not self.parameters and scores.shape[:-2] not in (points, torch.Size()):
            found = f"returned {_check.describe(scores)} for queries and keys with batch shape {list(points)}"
            remedy = "give tensors with heads as parameters: Potential.of(function, tensor)"
            raise ArgumentError("function", found, remedy)
        return scores

    def width(self, queries: Features, keys: Features) -> int:
        return 2 * queries.shape[-1]


def _terms(potential: Potential) -> tuple[Potential, ...]:
    return potential.terms if isinstance(potential, Sum) else (potential,)


def linear_terms(potential: Potential) -> list[tuple[Potential, Scalar]]:
    """A potential as Σ factor · term, with terms that are neither sums nor multiples."""
    if isinstance(potential, Scaled):
        return [(term, factor * potential.factor) for term, factor in linear_terms(potential.potential)]
    if isinstance(potential, Sum):
        return [pair for term in potential.terms for pair in linear_terms(term)]
    return [(potential, 1.0)]


def of_terms(terms: list[tuple[Potential, Scalar]]) -> Potential | None:
    """Σ factor · term, None for no terms."""
    scaled = [
        term if isinstance(factor, float) and factor == 1.0 else Scaled(term, factor)
        for term, factor in terms
    ]
    return None if not scaled else scaled[0] if len(scaled) == 1 else Sum(tuple(scaled))


def simple_parts(potential: Potential) -> list[Potential]:
    """The potentials that a potential is made of, and that are made of no others: leaves of sums, caps,
    ...
    """
    return [part for part in walk(potential) if isinstance(part, Potential) and not _inner(part)]


def with_simple_parts(potential: Potential, change: Callable[[Potential], Potential]) -> Potential:
    """The same potential with its simple parts replaced;
    refused where one may see tokens beside its parts.
    """
    if not _inner(potential):
        return change(potential)
    return with_parts(potential, Potential, lambda part: with_simple_parts(part, change))


def _inner(potential: Potential) -> list[Object]:
    return [child for child in children(potential) if isinstance(child, Potential)]


def project(name: str, points: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """wᵀx + b for each row; None is the identity, or zero."""
    if weight is not None:
        if points.shape[-1] != weight.shape[-2]:
            raise ArgumentError(
                f"w_{name}",
                f"takes width {weight.shape[-2]} and the points have {points.shape[-1]}",
                "give w (..., d, c) with d the width of the points",
            )
        points = project_points(points, weight)
    return points if bias is None else points + bias.unsqueeze(-2)


def project_both(
    x: Tensor, y: Tensor, w_q: Tensor | None, w_k: Tensor | None, b_q: Tensor | None, b_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Projected queries and keys, which must meet in one space."""
    queries, keys = project("q", x, w_q, b_q), project("k", y, w_k, b_k)
    if queries.shape[-1] != keys.shape[-1]:
        raise ArgumentError(
            "q and k",
            f"have widths {queries.shape[-1]} and {keys.shape[-1]}",
            "queries and keys are compared in one space: project them to one width",
        )
    return queries, keys


def project_differences(
    x: Tensor, y: Tensor, w_q: Tensor | None, w_k: Tensor | None, b_q: Tensor | None, b_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Queries and keys with the right differences q - k: from centered points, and in float64,
    so that no digits are lost.
    """
    if (w_q is None and w_k is None) or not y.shape[-2] or x.shape[-1] != y.shape[-1]:
        return project_both(x, y, w_q, w_k, b_q, b_k)
    kind = (
        torch.float64 if x.dtype == torch.float32 else x.dtype
    )  # a narrow bandwidth needs more digits than the points have
    x, y = x.to(kind), y.to(kind)
    w_q, w_k, b_q, b_k = (None if t is None else t.to(kind) for t in (w_q, w_k, b_q, b_k))
    center = y.detach().mean(-2, keepdim=True)
    queries, keys = project_both(x - center, y - center, w_q, w_k, b_q, b_k)
    return queries, keys + (project("k", center, w_k, None) - project("q", center, w_q, None))
