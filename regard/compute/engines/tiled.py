"""Blocks of query rows in plain torch: every potential and every normalizer, in O(n) memory, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard import _check
from regard.compute.blocks import Parts, by_rows, online
from regard.compute.engine import Engine, Prediction, engines, pairs, register, working_dtype
from regard.compute.engines.reference import feature_width
from regard.compute.engines.sdpa import CANCELLATION
from regard.compute.forms import Reduced, fast_form
from regard.compute.problem import Problem
from regard.compute.tiles import PAIRS, Tiling, rows_of
from regard.errors import ArgumentError
from regard.normalizers import Reference, Sigmoid, Sinkhorn, Softmax
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
        return None

    def run(self, problem: Problem) -> Tensor:
        exact = problem.to(working_dtype(problem.dtype))
        if isinstance(exact.normalizer, Sinkhorn):
            return self._sinkhorn(exact).to(problem.dtype)
        if isinstance(exact.normalizer, Softmax):
            return self._softmax(exact)[0].to(problem.dtype)
        return by_rows(_weigh, _parts(exact), self._tiling(exact)).to(problem.dtype)

    def free_energy(self, problem: Problem) -> Tensor:
        exact = problem.to(working_dtype(problem.dtype))
        if isinstance(exact.normalizer, Softmax):
            temperature = exact.normalizer.temperature
            return (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature) * self._softmax(exact)[1]
        if not exact.normalizer.rowwise:
            raise ArgumentError("normalizer", f"{type(exact.normalizer).__name__} couples the rows", "its free energy belongs to the whole matrix; name engine=Reference()")
        return by_rows(_best, _parts(exact), self._tiling(exact)).squeeze(-1)

    def predict(self, problem: Problem) -> Prediction:
        count = pairs(problem)
        passes = 1 if problem.normalizer.rowwise else 2 * getattr(problem.normalizer, "max_iterations", 1)
        held = 3 * 4 * min(float(self.pairs), count) * problem.potential.width(problem.queries, problem.keys)
        return Prediction(count * (2 * feature_width(problem) * passes + 20 + 2 * problem.values.shape[-1]), held)

    def _tiling(self, problem: Problem, prune: bool = True) -> Tiling:
        width = problem.potential.width(problem.queries, problem.keys)
        rows = rows_of(max(1, math.prod(problem.batch_shape)), problem.key_count, width, self.pairs)
        return Tiling(problem.support, problem.rows(), problem.columns(), rows, prune and problem.in_order())

    def _softmax(self, problem: Problem) -> tuple[Tensor, Tensor]:
        parts = _parts(problem)
        width = parts.potential.width(parts.queries, parts.keys)
        batch = max(1, math.prod(problem.batch_shape))
        rows = max(min(64, problem.query_count), rows_of(batch, problem.key_count, width, self.pairs))
        columns = max(64, self.pairs // (batch * rows * width))
        tiling = Tiling(problem.support, problem.rows(), problem.columns(), rows, problem.in_order())
        return online(parts, tiling, columns)

    def _sinkhorn(self, problem: Problem) -> Tensor:
        """Find the log-potentials of the keys without the matrix; then it is softmax attention with a key bias."""
        assert isinstance(problem.normalizer, Sinkhorn)
        tiling = self._tiling(problem, prune=False)
        parts = _parts(problem.change(normalizer=Softmax()))
        shares = query_shares(problem.log_queries, problem.query_count, problem.values).unsqueeze(-1)

        def column_mass(log_keys: Tensor) -> Tensor:
            weighted = parts.replace(queries=(parts.queries, shares), log_counts=log_keys.unsqueeze(-1), potential=parts.potential)
            return by_rows(_column_mass, weighted, tiling, summed=True).squeeze(-2)

        start = key_shares(problem.log_counts, problem.key_count, problem.values).expand(*problem.batch_shape, -1)
        log_keys = problem.normalizer.balance(column_mass, start)
        balanced = problem.change(normalizer=Softmax(), log_counts=log_keys)
        return next(engine for engine in engines() if engine.refuse(balanced) is None).run(balanced)


def _parts(problem: Problem) -> Parts:
    potential, queries, keys = _best_form(problem)
    counts = None if problem.log_counts is None else problem.log_counts.unsqueeze(-1)
    normalizer = problem.normalizer
    if isinstance(normalizer, Sigmoid) and normalizer.bias is None:  # blocks see fewer keys: fix the count now
        shift = normalizer.shift(problem.values.mT, Reference(problem.log_counts))
        normalizer = Sigmoid(shift[..., 0, 0] if isinstance(shift, Tensor) else shift)
    return Parts(potential, normalizer, queries, keys, counts, problem.values)


def _best_form(problem: Problem) -> tuple:  # type: ignore[type-arg]
    """A dot product where the scores are one and its terms do not cancel, else the potential's own fast form."""
    reduction = reduce.one(problem.potential, problem.queries, problem.keys, False)
    if isinstance(reduction, Reduction) and not reduction.residues:
        eps = torch.finfo(reduction.queries.dtype).eps
        if reduction.amplitude is None or _check.holds(reduction.amplitude * eps <= CANCELLATION):
            return Reduced.of(reduction)
    return fast_form.one(problem.potential, problem.queries, problem.keys)  # type: ignore[no-any-return]


def _reference(parts: Parts, allowed: Tensor | None) -> Reference:
    return Reference(None if parts.log_counts is None else parts.log_counts.squeeze(-1), allowed)


def _weigh(parts: Parts, allowed: Tensor | None) -> Tensor:
    scores = parts.potential.pair(parts.queries, parts.keys)
    return parts.normalizer.weights(scores, _reference(parts, allowed)) @ parts.values


def _best(parts: Parts, allowed: Tensor | None) -> Tensor:
    """The objective at its maximum, (..., rows, 1)."""
    scores = parts.potential.pair(parts.queries, parts.keys)
    reference = _reference(parts, allowed)
    best = parts.normalizer.objective(parts.normalizer.weights(scores, reference), scores, reference)
    return best.masked_fill(~reference.present(scores).any(-1), -math.inf).unsqueeze(-1)


def _column_mass(parts: Parts, allowed: Tensor | None) -> Tensor:
    """Σ_i a_i P_ij of one block, (..., 1, n)."""
    queries, shares = parts.queries
    scores = parts.potential.pair(queries, parts.keys)
    rows = Softmax().weights(scores, _reference(parts, allowed))
    return shares.mT @ rows


