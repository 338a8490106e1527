"""Blocks of query rows in plain torch: every potential and every normalizer, in O(n) memory, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.compute.blocks import Parts, by_rows, online, splits
from regard.compute.engine import Engine, Prediction, first_willing, pairs, register
from regard.compute.engines.reference import Reference as ReferenceEngine
from regard.compute.engines.reference import feature_width
from regard.compute.forms import Reduced, fast_form
from regard.compute.precision import precise
from regard.compute.problem import Problem
from regard.compute.tiles import PAIRS, Tiling, rows_of
from regard.errors import ArgumentError
from regard.normalizers import Reference, Sigmoid, Sinkhorn, Softmax
from regard.normalizers.base import without_empty_rows, zero_where
from regard.normalizers.sinkhorn import key_shares, query_shares
from regard.potentials.reductions import Reduction, reduce


@register
@dataclass(frozen=True, eq=False, repr=False)
class Tiled(Engine):
    """Everything the fused kernel cannot do. `pairs` is the number of query-key pairs held at once."""

    pairs: int = PAIRS
    name: ClassVar[str] = "tiled"
    rank: ClassVar[int] = 30

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise ArgumentError("pairs", f"is {self.pairs}", "give how many query-key pairs a tile may hold, one or more")

    def refuse(self, problem: Problem) -> str | None:
        if problem.query_count == 0 or problem.key_count == 0:
            return "there is nothing to cut into tiles."
        if problem.hidden_parameters():
            return (
                "the potential uses a tensor that wants a gradient but is not one of its parameters; declare it: Potential.of(f, tensor)."
            )
        return None

    def run(self, problem: Problem) -> Tensor:
        exact = precise(problem)
        if isinstance(exact.normalizer, Sinkhorn):
            return self._sinkhorn(exact).to(problem.dtype)
        if isinstance(exact.normalizer, Softmax):
            return self._softmax(exact)[0].to(problem.dtype)
        parts = _parts(exact)
        return by_rows(_weigh, parts, self._tiling(exact, parts)).to(problem.dtype)

    def free_energy(self, problem: Problem) -> Tensor:
        exact = precise(problem)
        if isinstance(exact.normalizer, Softmax):
            temperature, lse = exact.normalizer.temperature, self._softmax(exact)[1]
            seen = lse > -math.inf  # the energy of nothing is -inf whatever the temperature
            factor = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
            energy = factor * torch.where(seen, lse, torch.zeros_like(lse))
            return energy.masked_fill(~seen, -math.inf)
        if not exact.normalizer.rowwise:  # the rows are coupled: all of them are needed at once
            return ReferenceEngine().free_energy(exact)
        parts = _parts(exact)
        best = by_rows(_best, parts, self._tiling(exact, parts)).squeeze(-1)
        return best.expand(*problem.batch_shape, problem.query_count)

    def predict(self, problem: Problem) -> Prediction:
        count = pairs(problem)
        passes = 1 if problem.normalizer.rowwise else 2 * getattr(problem.normalizer, "max_iterations", 1)
        held = 3 * 4 * min(float(self.pairs), count) * problem.potential.width(problem.queries, problem.keys)
        return Prediction(count * (2 * feature_width(problem) * passes + 20 + 2 * problem.values.shape[-1]), held)

    def _tiling(self, problem: Problem, parts: Parts, prune: bool = True) -> Tiling:
        """Blocks of one element of the batch where that is possible: more rows, and keys that stay in cache."""
        batch = problem.batch_shape
        split = splits(parts, batch)
        width = parts.potential.width(parts.queries, parts.keys)
        rows = rows_of(1 if split else max(1, batch.numel()), problem.key_count, width, self.pairs)
        marks = (problem.rows(), problem.columns())
        return Tiling(problem.support, *marks, rows, prune and problem.in_order(), batch=tuple(batch) if split else None)

    def _softmax(self, problem: Problem) -> tuple[Tensor, Tensor]:
        parts = _parts(problem)
        tiling = self._tiling(problem, parts)
        rows = max(min(64, problem.query_count), tiling.rows)
        batch = 1 if tiling.batch is not None else max(1, problem.batch_shape.numel())
        columns = max(64, self.pairs // (batch * rows * parts.potential.width(parts.queries, parts.keys)))
        return online(parts, tiling.replace(rows=rows, columns=columns))

    def _sinkhorn(self, problem: Problem) -> Tensor:
        """Find the log-potentials of the keys without the matrix; then it is softmax attention with a key bias."""
        assert isinstance(problem.normalizer, Sinkhorn)
        parts = _parts(problem.change(normalizer=Softmax()))
        tiling = self._tiling(problem, parts, prune=False)
        shares = query_shares(problem.log_queries, problem.query_count, problem.values).unsqueeze(-1)

        def column_mass(log_keys: Tensor) -> Tensor:
            weighted = parts.replace(queries=(parts.queries, shares), log_counts=log_keys.unsqueeze(-1), potential=parts.potential)
            return by_rows(_column_mass, weighted, tiling, summed=True).squeeze(-1)

        start = key_shares(problem.log_counts, problem.key_count, problem.values).expand(*problem.batch_shape, -1)
        log_keys = problem.normalizer.balance(column_mass, start)
        balanced = problem.change(normalizer=Softmax(), log_counts=log_keys)
        return first_willing(balanced).run(balanced)


def _parts(problem: Problem) -> Parts:
    potential, queries, keys = _best_form(problem)
    counts = None if problem.log_counts is None else problem.log_counts.unsqueeze(-1)
    normalizer = problem.normalizer
    if isinstance(normalizer, Sigmoid) and normalizer.bias is None:  # blocks see fewer keys: fix the count now
        shift = normalizer.shift(problem.values.mT, Reference(problem.log_counts))
        normalizer = Sigmoid(shift[..., 0, 0] if isinstance(shift, Tensor) else shift)
    return Parts(potential, normalizer, queries, keys, counts, problem.values)


def _best_form(problem: Problem) -> tuple:
    """A dot product where the scores are one and its terms do not cancel, else the potential's own fast form."""
    reduction = reduce.one(problem.potential, problem.queries, problem.keys, False)
    if isinstance(reduction, Reduction) and not reduction.residues:
        return Reduced.of(reduction)
    return fast_form.one(problem.potential, problem.queries, problem.keys)


def _weigh(parts: Parts, allowed: Tensor | None) -> Tensor:
    scores = parts.potential.pair(parts.queries, parts.keys)
    return parts.normalizer.weights(scores, parts.reference(allowed)) @ parts.values


def _best(parts: Parts, allowed: Tensor | None) -> Tensor:
    """The objective at its maximum, (..., rows, 1)."""
    scores = parts.potential.pair(parts.queries, parts.keys)
    reference = parts.reference(allowed)
    best = parts.normalizer.objective(parts.normalizer.weights(scores, reference), scores, reference)
    return best.masked_fill(~reference.present(scores).any(-1), -math.inf).unsqueeze(-1)


def _column_mass(parts: Parts, allowed: Tensor | None) -> Tensor:
    """Σ_i a_i P_ij of one block, (..., n, 1): the rows are normalized by their weights, not one by one."""
    queries, shares = parts.queries
    scores, empty = without_empty_rows(parts.replace(queries=queries).scores(allowed))
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return weights.mT @ zero_where(shares / weights.sum(-1, keepdim=True), empty)
