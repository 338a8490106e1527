"""The definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regard.compute.engine import Engine, Prediction, pairs, register
from regard.compute.precision import precise
from regard.compute.problem import Problem


@register
@dataclass(frozen=True, eq=False, repr=False)
class Reference(Engine):
    """The paper, line by line: scores, law, mean. Never refuses; holds the m × n matrix."""

    name: ClassVar[str] = "reference"
    rank: ClassVar[int] = 100

    def refuse(self, problem: Problem) -> str | None:
        return None

    def run(self, problem: Problem) -> Tensor:
        exact = precise(problem)
        scores = exact.potential.pair(exact.queries, exact.keys)
        weights = exact.normalizer.weights(scores, exact.reference())
        return (weights @ exact.values).to(problem.dtype)

    def free_energy(self, problem: Problem) -> Tensor:
        exact = precise(problem)
        scores = exact.potential.pair(exact.queries, exact.keys)
        reference = exact.reference()
        weights = exact.normalizer.weights(scores, reference)
        best = exact.normalizer.objective(weights, scores, reference)
        best = best.masked_fill(~reference.present(scores).any(-1), -float("inf"))
        return best.expand(*problem.batch_shape, problem.query_count)

    def predict(self, problem: Problem) -> Prediction:
        count = pairs(problem)
        width = problem.potential.width(problem.queries, problem.keys)
        return Prediction(count * (2 * feature_width(problem) + 5 + 2 * problem.values.shape[-1]), 4 * count * (2 + width))


def feature_width(problem: Problem) -> int:
    """Numbers compared in each pair."""
    import torch.utils._pytree as pytree

    return sum(t.shape[-1] for t in pytree.tree_leaves(problem.queries) if isinstance(t, Tensor))
