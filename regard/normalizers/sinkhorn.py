"""Doubly stochastic weights: entropic optimal transport between queries and keys."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard import _check
from regard._transforms import moves
from regard.errors import ArgumentError, ConvergenceWarning
from regard.normalizers.base import Normalizer, Reference, entropy_term, expectation, log_total
from regard.normalizers.softmax import Softmax

ColumnMass = Callable[[Tensor], Tensor]
"""log-potentials of the keys (..., n) -> the mass Σ_i a_i P_ij that the softmax rows put on each key (...,
n).
"""


@dataclass(frozen=True, eq=False, repr=False)
class Sinkhorn(Normalizer):
    """P_ij = exp(s_ij + f_i + g_j) with rows that sum to one and columns that carry the keys' share
    (sander2022).

    With equal weights and as many keys as queries all columns sum to one. The rows are exact laws; the
    columns are met to `tolerance` (relative), or after `max_iterations` as far as they are: tolerance 0 means
    exactly that many. It maximizes ⟨P, S⟩ - Σ P log P under both constraints.

    Examples:
        >>> fair = regard.Attention(regard.Dot(), normalizer=regard.Sinkhorn(max_iterations=50))
        >>> torch.allclose(fair.weights(torch.randn(4, 2)).sum(-1), torch.ones(4))
        True
    """

    tolerance: float = 1e-6
    max_iterations: int = 200
    laws: ClassVar[bool] = True
    variational: ClassVar[bool] = True
    rowwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ArgumentError(
                "tolerance", f"is {self.tolerance}", "give a number in [0, 1); 0 runs all the iterations"
            )
        if self.max_iterations < 1:
            raise ArgumentError("max_iterations", f"is {self.max_iterations}", "give one or more")

    def weights(self, scores: Tensor, reference: Reference) -> Tensor:
        shares = query_shares(reference.log_queries, scores.shape[-2], scores)
        log_shares = key_shares(reference.log_counts, scores.shape[-1], scores)
        allowed = () if reference.allowed is None else reference.allowed.shape[:-2]
        batch = torch.broadcast_shapes(scores.shape[:-2], allowed, log_shares.shape[:-1], shares.shape[:-1])

        def column_mass(log_keys: Tensor) -> Tensor:
            rows = Softmax().weights(scores, Reference(log_keys, reference.allowed))
            return (shares.unsqueeze(-1) * rows).sum(-2)

        log_keys = self.balance(column_mass, log_shares.expand(*batch, -1))
        return Softmax().weights(scores, Reference(log_keys, reference.allowed))

    def balance(self, column_mass: ColumnMass, log_shares: Tensor) -> Tensor:
        """The log-potentials g of the keys, by alternating row and column normalization.

        Where the iteration stops at a tolerance, derivatives are those of the balanced coupling, to that
        tolerance: steps that start at the solution forget how it was found and add up to the implicit
        derivative. Else every step is differentiated.
        """

        def gap(log_keys: Tensor) -> Tensor:
            mass = column_mass(log_keys)
            reached = (mass > 0) & (log_shares > -math.inf)
            return torch.where(
                reached,
                log_shares - torch.where(reached, mass, torch.ones_like(mass)).log(),
                torch.zeros_like(mass),
            )

        steps, log_keys = self.max_iterations, log_shares
        if self.tolerance > 0 and log_shares.numel():
            first = gap(log_shares)
            differentiated = moves(first)
            if (
                _check.holds(first.amax() < math.inf) is not None
            ):  # vmap reads no data, so there every step is taken
                with torch.no_grad():
                    log_keys = self._solve(gap, log_shares.detach())
                    steps = self._memory(gap, log_keys) if differentiated else 0
        for _ in range(steps):
            log_keys = log_keys + gap(log_keys)
        return log_keys

    def _solve(self, gap: Callable[[Tensor], Tensor], log_keys: Tensor) -> Tensor:
        worst = math.inf
        for _ in range(self.max_iterations):
            step = gap(log_keys).detach()
            worst = float(step.abs().amax())
            if worst <= self.tolerance:
                return log_keys
            log_keys = log_keys + step
        warnings.warn(
            f"Sinkhorn stopped after {self.max_iterations} iterations, columns off by {worst:.1e}, "
            f"tolerance {self.tolerance:.1e}; "
            "raise max_iterations or tolerance, or check that the support admits a doubly stochastic matrix",
            ConvergenceWarning,
            stacklevel=5,
        )
        return log_keys

    def _memory(self, gap: Callable[[Tensor], Tensor], log_keys: Tensor) -> int:
        """After how many steps a small displacement of the solution is forgotten, to the tolerance."""
        shift = 0.01 * torch.sin(
            12.9898 * torch.arange(log_keys.shape[-1], device=log_keys.device).square()
        ).to(log_keys)  # no pattern
        moved, rest = log_keys + shift, float(gap(log_keys).abs().amax())
        enough = max(self.tolerance, 4 * torch.finfo(log_keys.dtype).eps) * float(shift.abs().amax()) + rest
        for count in range(1, self.max_iterations + 1):
            step = gap(moved).detach()
            if float(step.abs().amax()) <= enough:
                return count + 1
            moved = moved + step
        return self.max_iterations

    def objective(self, weights: Tensor, scores: Tensor, reference: Reference) -> Tensor:
        return expectation(weights, scores) - entropy_term(weights, None).sum(-1)


def key_shares(log_counts: Tensor | None, count: int, like: Tensor) -> Tensor:
    """log of the share of each key, (..., n)."""
    if log_counts is None:
        return torch.full((count,), -math.log(max(count, 1)), dtype=like.dtype, device=like.device)
    return log_counts - log_total(log_counts).unsqueeze(-1)


def query_shares(log_queries: Tensor | None, count: int, like: Tensor) -> Tensor:
    """The share of each query, (..., m)."""
    return key_shares(log_queries, count, like).exp()
