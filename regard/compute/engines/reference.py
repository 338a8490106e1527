"""The definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.utils._pytree as pytree
from torch import Tensor

from regard.compute.engine import Engine, Plan, Prediction, count_pairs, register
from regard.compute.precision import with_enough_digits
from regard.compute.problem import Problem


@register
@dataclass(frozen=True, eq=False, repr=False)
class Reference(Engine):
    """The paper, line by line: scores, law, mean. Never refuses; holds the m × n matrix.

    Examples:
        >>> from regard.engines import ReferenceEngine
        >>> x = torch.randn(5, 3)
        >>> exact = regard.apply(regard.Attention(regard.Laplace()), x, engine=ReferenceEngine())
        >>> torch.allclose(exact, regard.Attention(regard.Laplace())(x), atol=1e-6)
        True
    """

    name: ClassVar[str] = "reference"
    rank: ClassVar[int] = 100

    def plan(self, problem: Problem) -> ReferencePlan:
        """The problem in the dtype that keeps its digits."""
        return ReferencePlan(self, problem, with_enough_digits(problem))


@dataclass(frozen=True, eq=False, repr=False)
class ReferencePlan(Plan):
    """All scores at once. What is decided here: the dtype, that of the problem `exact`."""

    exact: Problem

    def run(self) -> Tensor:
        exact = self.exact
        scores = exact.potential.pair(exact.queries, exact.keys)
        weights = exact.normalizer.weights(scores, exact.reference())
        return (weights @ exact.values).to(self.problem.dtype)

    def free_energy(self) -> Tensor:
        exact = self.exact
        scores = exact.potential.pair(exact.queries, exact.keys)
        reference = exact.reference()
        weights = exact.normalizer.weights(scores, reference)
        best = exact.normalizer.objective(weights, scores, reference)
        best = best.masked_fill(~reference.present(scores).any(-1), -float("inf"))
        return best.expand(*exact.batch_shape, exact.query_count)

    def predict(self) -> Prediction:
        problem = self.problem
        count = count_pairs(problem)
        width = problem.potential.width(problem.queries, problem.keys)
        flops = count * (2 * feature_width(problem) + 5 + 2 * problem.values.shape[-1])
        how = f"all {count:.3g} scores at once in {str(self.exact.dtype).removeprefix('torch.')}"
        return Prediction(flops, 4 * count * (2 + width), how)


def feature_width(problem: Problem) -> int:
    """How many numbers of a query are compared in each pair."""
    return sum(t.shape[-1] for t in pytree.tree_leaves(problem.queries) if isinstance(t, Tensor))
