"""Rows of attention on demand, and what people ask of rows that a fused kernel never shows: streamed,
in O(n) memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard import _check
from regard import attention as declared
from regard.attention import Attention
from regard.compute.application import problem_of
from regard.compute.engine import working_dtype
from regard.compute.kernel.tiles import rows_per_tile
from regard.compute.problem import Problem
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.normalizers import Reference

Rows = slice | Tensor | list[int] | None


@dataclass(frozen=True)
class RowStatistics:
    """One number for each query of each head, (..., m).

    entropy: -Σ p log p, in nats. max_logit: the largest score among visible keys. effective_support: 1/Σp²,
    how many keys share the row. softmax_norm: g₁ = p₁(1 - p₁ + p₂), at least the norm of softmax's Jacobian
    diag(p) - ppᵀ (yudin2025). sink_mass: what the first keys receive.

    Examples:
        >>> from regard.derive import row_statistics
        >>> found = row_statistics(regard.Attention(regard.Dot()), torch.zeros(4, 2))
        >>> found.effective_support.tolist(), found.sink_mass.tolist()  # uniform rows
        ([4.0, 4.0, 4.0, 4.0], [0.25, 0.25, 0.25, 0.25])
    """

    entropy: Tensor
    max_logit: Tensor
    effective_support: Tensor
    softmax_norm: Tensor
    sink_mass: Tensor

    def __repr__(self) -> str:
        shape = list(self.entropy.shape)
        means = ", ".join(
            f"{name} {float(getattr(self, name).mean()):.4g}" for name in self.__dataclass_fields__
        )
        return f"RowStatistics{shape}: means {means}"


@declared.weights.rule(Attention)
def _weights(
    attention: Attention, x: Measure | Tensor, context: Measure | Tensor | None, rows: Rows
) -> Tensor:
    problem = problem_of(attention, x, context)
    chosen = _choose(rows, problem.query_count, problem.device)
    if not problem.normalizer.rowwise:  # the rows depend on each other
        scores = problem.potential.pair(problem.queries, problem.keys)
        return problem.normalizer.weights(scores, problem.reference())[..., chosen, :]
    return _law(problem, chosen)[1]


def row_statistics(
    attention: Attention, x: Measure | Tensor, context: Measure | Tensor | None = None, *, sinks: int = 1
) -> RowStatistics:
    """Entropy, largest logit, effective support, softmax-Jacobian norm and sink mass of every row,
    without the m × n matrix.

    Examples:
        >>> layer = regard.Attention(regard.Dot(), support=regard.Causal())
        >>> found = regard.derive.row_statistics(layer, torch.zeros(3, 2))
        >>> torch.allclose(found.effective_support, torch.tensor([1.0, 2.0, 3.0]))
        True
    """
    problem = problem_of(attention, x, context)
    if problem.key_count == 0:
        raise ArgumentError("context", "is empty", "a row over no keys has no statistics")
    if sinks < 0 or sinks > problem.key_count:
        raise ArgumentError(
            "sinks",
            f"is {sinks}",
            f"there are {problem.key_count} keys; say how many of the first ones are sinks",
        )
    if not problem.normalizer.rowwise:
        found = f"normalizes by {type(problem.normalizer).__name__}, which couples the rows"
        raise ArgumentError("attention", found, "take attention.weights(x) and its statistics")
    with torch.no_grad():
        problem = problem.to(working_dtype(problem.dtype))
        parts = [_statistics(*_law(problem, rows), sinks) for rows in _tiles(problem)]
    if not parts:
        return RowStatistics(*(problem.values.new_zeros(*problem.batch_shape, 0) for _ in range(5)))
    return RowStatistics(*(torch.cat(column, -1) for column in zip(*parts, strict=True)))


def _tiles(problem: Problem) -> Iterator[Tensor]:
    count = rows_per_tile(
        max(1, problem.batch_shape.numel()),
        problem.key_count,
        problem.potential.width(problem.queries, problem.keys),
    )
    for low in range(0, problem.query_count, count):
        yield torch.arange(low, min(low + count, problem.query_count), device=problem.device)


def _law(problem: Problem, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (-inf outside the support) and weights of some rows, (..., rows, n)."""
    scores = problem.potential.pair(pytree.tree_map(lambda t: t[..., rows, :], problem.queries), problem.keys)
    reference = Reference(
        problem.log_counts, problem.support.allows(problem.rows()[..., rows], problem.columns())
    )
    shape = (*problem.batch_shape, *scores.shape[-2:])
    return reference.supported(scores).expand(shape), problem.normalizer.weights(scores, reference).expand(
        shape
    )


def _statistics(scores: Tensor, weights: Tensor, sinks: int) -> tuple[Tensor, ...]:
    entropy = -torch.xlogy(weights, weights).sum(-1)
    mass, squares = weights.sum(-1), weights.square().sum(-1)
    support = torch.where(
        squares > 0,
        mass.square() / squares.clamp_min(torch.finfo(squares.dtype).tiny),
        torch.zeros_like(squares),
    )
    return entropy, scores.amax(-1), support, softmax_norm(weights), weights[..., :sinks].sum(-1)


def softmax_norm(law: Tensor) -> Tensor:
    """g₁(p) = p₁ (1 - p₁ + p₂) of each row, with 1 - p₁ summed from the others,
    because the difference loses digits (yudin2025).
    """
    if law.shape[-1] < 2:
        return torch.zeros(law.shape[:-1], dtype=law.dtype, device=law.device)
    top, place = law.topk(2, -1)
    others = law.scatter(-1, place[..., :1], 0.0).sum(-1)
    return top[..., 0] * (others + top[..., 1])


def _choose(rows: Rows, count: int, device: torch.device) -> Tensor:
    every = torch.arange(count, device=device)
    if rows is None:
        return every
    try:
        return every[rows].reshape(-1)
    except (IndexError, TypeError) as error:
        raise ArgumentError(
            "rows", f"is {_check.describe(rows)}", f"give a slice or indices of the {count} queries"
        ) from error
