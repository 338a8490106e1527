"""Reversed attention: the backward pass read as attention, R_i = P_i (h - P_i h) with h_j = ⟨u_i,
v_j⟩ (katz2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._types import Scalar, over_scores
from regard._verb import Verb
from regard.attention import Attention
from regard.compute.application import problem_of
from regard.compute.problem import Problem
from regard.compute.selection import select
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.normalizers import Reference
from regard.potentials import Bilinear, Cosine, Dot, NormedDot, Potential


class ReversedAttention:
    """How a loss pulls on the scores: R = c · ∂loss/∂scores, c the factor of the inner product, so that
    ∂loss/∂q = R K, ∂loss/∂k = Rᵀ Q.

    Each row is a signed measure on the keys that its query sees: it has the support of the attention row and
    total mass zero.

    Examples:
        >>> from regard.derive import reversed_attention
        >>> found = reversed_attention(regard.Attention(regard.Dot()), torch.randn(4, 3), torch.randn(4, 3))
        >>> bool(found.rows().sum(-1).abs().max() < 1e-5)  # each row has total mass zero
        True
    """

    def __init__(self, problem: Problem, cotangent: Tensor) -> None:
        self._problem, self._cotangent = problem, cotangent
        self._factor = factor.one(problem.potential, problem)

    def rows(self, chosen: slice | None = None) -> Tensor:
        """R itself, or some rows of it, (..., m, n)."""
        problem = self._problem
        some = slice(None) if chosen is None else chosen
        with torch.no_grad():
            scores = problem.potential.pair(
                pytree.tree_map(lambda t: t[..., some, :], problem.queries), problem.keys
            )
            reference = Reference(
                problem.log_counts, problem.support.allows(problem.rows()[..., some], problem.columns())
            )
            weights, pull = torch.func.vjp(lambda s: problem.normalizer.weights(s, reference), scores)[:2]
            by_weights = self._cotangent[..., some, :] @ problem.values.mT
            by_scores = (
                pull(by_weights.sum_to_size(weights.shape))[0]
                if by_weights.shape != weights.shape
                else pull(by_weights)[0]
            )
            return by_scores if self._factor is None else by_scores * over_scores(self._factor)

    @cached_property
    def _stream(self) -> tuple[Tensor, Tensor]:
        if self._factor is None:
            raise ArgumentError(
                "attention",
                f"compares by {type(self._problem.potential).__name__}, which is not an inner product of "
                "queries and keys",
                "R·K and Rᵀ·Q exist for Dot, NormedDot, Bilinear and Cosine; rows() gives R for every "
                "potential",
            )
        problem = self._problem
        queries, keys = (t.detach().requires_grad_() for t in (problem.queries, problem.keys))
        with torch.enable_grad():
            out = select(problem.replace(queries=queries, keys=keys)).run()
            by_queries, by_keys = torch.autograd.grad(out, (queries, keys), self._cotangent)
        return by_queries, by_keys

    def times_keys(self) -> Tensor:
        """R K, the gradient of the queries, without R."""
        return self._stream[0]

    def times_queries(self) -> Tensor:
        """Rᵀ Q, the gradient of the keys, without R."""
        return self._stream[1]


def reversed_attention(
    attention: Attention, x: Measure | Tensor, cotangent: Tensor, context: Measure | Tensor | None = None
) -> ReversedAttention:
    """The signed measures R with which a gradient `cotangent` of the outputs (..., m,
    e) reaches the scores (katz2024).

    Examples:
        >>> from regard.derive import reversed_attention
        >>> x, u = torch.randn(4, 3), torch.randn(4, 3)
        >>> q = x.clone().requires_grad_()
        >>> (gradient,) = torch.autograd.grad((regard.attend(q, x, x) * u).sum(), q)
        >>> found = reversed_attention(regard.Attention(regard.Dot()), x, u)
        >>> torch.allclose(found.times_keys(), gradient, atol=1e-5)
        True
    """
    problem = pytree.tree_map(
        lambda t: t.detach() if isinstance(t, Tensor) else t, problem_of(attention, x, context)
    )
    if not problem.normalizer.rowwise:
        found = f"normalizes by {type(problem.normalizer).__name__}, which couples the rows"
        raise ArgumentError("attention", found, "reversed attention is row by row: use a normalizer of rows")
    shape = (*problem.batch_shape, problem.query_count, problem.values.shape[-1])
    if not isinstance(cotangent, Tensor) or tuple(cotangent.shape) != shape:
        found = (
            f"has shape {list(cotangent.shape)}"
            if isinstance(cotangent, Tensor)
            else f"is a {type(cotangent).__name__}"
        )
        raise ArgumentError("cotangent", found, f"give one gradient for each output: {list(shape)}")
    return ReversedAttention(problem, cotangent.detach().to(problem.dtype))


@dataclass(frozen=True)
class Lens:
    """What one gradient step does to a query: keys that it moves towards and keys that it moves away from,
    strongest first.

    Examples:
        >>> from regard.derive import backward_lens
        >>> x, u, names = torch.randn(4, 3), torch.randn(4, 3), list("abcd")
        >>> found = backward_lens(regard.Attention(regard.Dot()), x, u, 0, names=names)  # a Lens
        >>> found.query, bool(found.towards[0][1] >= 0 >= found.away[0][1])
        (0, True)
    """

    query: int
    towards: tuple[tuple[str, float], ...]
    away: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        def in_words(pulls: tuple[tuple[str, float], ...]) -> str:
            return ", ".join(f"{name} ({pull:.3g})" for name, pull in pulls) or "none"

        return (
            f"a step against the gradient moves query {self.query} towards {in_words(self.towards)} and "
            f"away from {in_words(self.away)}"
        )

    __repr__ = __str__


def backward_lens(
    attention: Attention,
    x: Measure | Tensor,
    cotangent: Tensor,
    query: int,
    *,
    context: Measure | Tensor | None = None,
    count: int = 3,
    names: list[str] | None = None,
) -> Lens:
    """Which keys a gradient step pulls a query towards: -R_ij, since the step is q_i - η Σ_j R_ij k_j
    (katz2024).

    Heads, and elements of a batch, are summed.

    Examples:
        >>> keys, names = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), ["right", "up"]
        >>> pull = torch.tensor([[-1.0, 0.0], [0.0, 0.0]])  # the loss falls as output 0 moves to the right
        >>> found = regard.derive.backward_lens(regard.Attention(regard.Dot()), keys, pull, 0, names=names)
        >>> found.towards[0][0]
        'right'
    """
    problem = problem_of(attention, x, context)
    if not -problem.query_count <= query < problem.query_count:
        raise ArgumentError("query", f"is {query}", f"there are {problem.query_count} queries")
    query = range(problem.query_count)[query]
    if names is not None and len(names) != problem.key_count:
        raise ArgumentError(
            "names", f"has {len(names)} entries", f"give one for each of the {problem.key_count} keys"
        )
    row = reversed_attention(attention, x, cotangent, context).rows(slice(query, query + 1))
    pulls = -row.reshape(-1, row.shape[-1]).sum(0)
    order = pulls.argsort(descending=True).tolist()
    named = [(str(j) if names is None else names[j], float(pulls[j])) for j in order]
    towards = tuple((name, pull) for name, pull in named[:count] if pull > 0)
    away = tuple((name, pull) for name, pull in named[::-1][:count] if pull < 0)
    return Lens(query, towards, away)


factor = Verb("factor")
"""factor.one(potential, problem) -> c where scores are c · q·k of the features, else None."""


@factor.rule(Dot)
@factor.rule(NormedDot)
def _dot(potential: Dot | NormedDot, problem: Problem) -> Scalar:
    return potential.factor(problem.queries.shape[-1])


@factor.rule(Bilinear)
def _bilinear(potential: Bilinear, problem: Problem) -> Scalar:
    return 1.0


@factor.rule(Cosine)
def _cosine(potential: Cosine, problem: Problem) -> Scalar:
    return potential.scale


@factor.rule(Potential)
def _other(potential: Potential, problem: Problem) -> None:
    return None
