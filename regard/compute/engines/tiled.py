"""Blocks in plain torch: every potential and every normalizer of rows, O(n) memory, forward and backward."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard._refused import Refused
from regard._transforms import is_recorded, is_shape_only
from regard._types import over_rows
from regard.compute.engine import Engine, Plan, Prediction, count_pairs, register
from regard.compute.engines.reference import Reference as ReferenceEngine
from regard.compute.engines.reference import feature_width
from regard.compute.forms import Reduced, fast_form
from regard.compute.kernel.blocks import Parts, attend_online, can_split_batch, map_rows, pull_online
from regard.compute.kernel.tiles import PAIRS, Tiling, rows_per_tile
from regard.compute.precision import needed_dtype
from regard.compute.problem import Problem
from regard.compute.selection import select
from regard.errors import ArgumentError
from regard.normalizers import Exponential, Normalizer, Reference, Sigmoid, Sinkhorn, Softmax
from regard.normalizers.base import without_empty_rows, zero_where
from regard.normalizers.sinkhorn import key_shares, query_shares
from regard.potentials.reductions import Reduction, reduce


@register
@dataclass(frozen=True, eq=False, repr=False)
class Tiled(Engine):
    """Everything the fused kernel cannot do. `pairs` is the number of query-key pairs held at once.

    Examples:
        >>> from regard.engines import Tiled
        >>> layer, x = regard.Attention(regard.Laplace()), torch.randn(9, 4)
        >>> small = regard.apply(layer, x, engine=Tiled(pairs=16))  # sixteen pairs at once
        >>> torch.allclose(small, layer(x), atol=1e-6)
        True
    """

    pairs: int = PAIRS
    name: ClassVar[str] = "tiled"
    rank: ClassVar[int] = 30

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise ArgumentError(
                "pairs", f"is {self.pairs}", "give how many query-key pairs a tile may hold, one or more"
            )

    def plan(self, problem: Problem) -> TiledPlan | Refused:
        """The fastest form of the scores in the dtype that keeps their digits, and the size of the blocks."""
        if problem.query_count == 0 or problem.key_count == 0:
            return Refused("there is nothing to cut into tiles.")
        if is_recorded(problem.values) and not is_shape_only(problem.values):
            return Refused("blocks are cut while a program runs, and this one is only recorded.")
        if problem.hidden_parameters():
            return Refused(
                "the potential uses a tensor that requires a gradient but is not one of its parameters; "
                "declare it: Potential.of(f, tensor)."
            )
        if not problem.normalizer.rowwise and not isinstance(problem.normalizer, Sinkhorn):
            return Refused(
                f"the rows of {type(problem.normalizer).__name__} depend on each other, "
                "so blocks of rows are not enough."
            )
        reduction = reduce.one(problem.potential, problem.queries, problem.keys, False)
        exact = problem.to(needed_dtype(problem, reduction))
        if exact is not problem:
            reduction = reduce.one(exact.potential, exact.queries, exact.keys, False)
        parts = _make_parts(exact, reduction)
        tiling = self._tile(exact, parts)
        if isinstance(exact.normalizer, Softmax):
            return OnlinePlan(self, problem, exact, parts, self._cut_keys(exact, parts, tiling))
        if isinstance(exact.normalizer, Sinkhorn):
            unpruned = tiling.replace(in_order=False)
            return SinkhornPlan(self, problem, exact, parts.replace(normalizer=Softmax()), unpruned)
        return RowsPlan(self, problem, exact, parts, tiling)

    def _tile(self, problem: Problem, parts: Parts) -> Tiling:
        """Blocks of one element of the batch where that is possible, so that its keys stay in cache."""
        batch = problem.batch_shape
        split = can_split_batch(parts, batch)
        width = parts.potential.width(parts.queries, parts.keys)
        rows = rows_per_tile(1 if split else max(1, batch.numel()), problem.key_count, width, self.pairs)
        marks = (problem.rows(), problem.columns())
        return Tiling(
            problem.support, *marks, rows, problem.in_order(), batch=tuple(batch) if split else None
        )

    def _cut_keys(self, problem: Problem, parts: Parts, tiling: Tiling) -> Tiling:
        """The same with blocks of keys too: softmax needs no whole rows."""
        rows = max(min(64, problem.query_count), tiling.rows)
        batch = 1 if tiling.batch is not None else max(1, problem.batch_shape.numel())
        columns = max(64, self.pairs // (batch * rows * parts.potential.width(parts.queries, parts.keys)))
        return tiling.replace(rows=rows, columns=columns)


@dataclass(frozen=True, eq=False, repr=False)
class TiledPlan(Plan):
    """Abstract: a problem cut into blocks.

    What is decided here: the dtype, that of the problem `exact`; the form of the scores (`parts`); and the
    blocks (`tiling`).
    """

    exact: Problem
    parts: Parts
    tiling: Tiling

    @abstractmethod
    def passes(self) -> int:
        """How often all scores are computed."""

    def predict(self) -> Prediction:
        problem, tiling = self.problem, self.tiling
        assert isinstance(self.engine, Tiled)
        count = count_pairs(problem)
        held = (
            3
            * 4
            * min(float(self.engine.pairs), count)
            * problem.potential.width(problem.queries, problem.keys)
        )
        flops = count * (2 * feature_width(problem) * self.passes() + 20 + 2 * problem.values.shape[-1])
        keys = "all" if tiling.columns is None else f"{min(tiling.columns, problem.key_count)}"
        blocks = f"{min(tiling.rows, problem.query_count)} queries and {keys} keys"
        batch = "" if tiling.batch is None else ", one element of the batch at a time"
        kind = str(self.exact.dtype).removeprefix("torch.")
        how = f"{type(self.parts.potential).__name__} scores in blocks of {blocks} in {kind}{batch}"
        return Prediction(flops, held, how)


@dataclass(frozen=True, eq=False, repr=False)
class OnlinePlan(TiledPlan):
    """Softmax with running sums over blocks of keys."""

    def passes(self) -> int:
        return 1

    def run(self) -> Tensor:
        return attend_online(self.parts, self.tiling)[0].to(self.problem.dtype)

    def free_energy(self) -> Tensor:
        return self.run_with_free_energy()[1]

    def run_with_free_energy(self) -> tuple[Tensor, Tensor]:
        out, lse = attend_online(self.parts, self.tiling)
        return out.to(self.problem.dtype), self._energy(lse)

    def run_with_level(self, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        out, lse = attend_online(self.parts, self.tiling)
        return out.to(self.problem.dtype), lse.to(kind)

    def pull_part(
        self, whole: tuple[Tensor, Tensor], cotangents: tuple[Tensor, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        return pull_online(self.parts, self.tiling, whole, cotangents)

    def _energy(self, lse: Tensor) -> Tensor:
        """Free energies from log-sum-exps (..., m)."""
        assert isinstance(self.exact.normalizer, Softmax)
        temperature = self.exact.normalizer.temperature
        seen = lse > -math.inf  # the energy of nothing is -inf whatever the temperature
        energy = over_rows(temperature) * torch.where(seen, lse, torch.zeros_like(lse))
        return energy.masked_fill(~seen, -math.inf)


@dataclass(frozen=True, eq=False, repr=False)
class RowsPlan(TiledPlan):
    """Whole rows, for normalizers that need them."""

    def passes(self) -> int:
        return 1

    def run(self) -> Tensor:
        return map_rows(_weigh, self.parts, self.tiling).to(self.problem.dtype)

    def free_energy(self) -> Tensor:
        best = map_rows(_maximize, self.parts, self.tiling).squeeze(-1)
        return best.expand(*self.exact.batch_shape, self.exact.query_count)


@dataclass(frozen=True, eq=False, repr=False)
class SinkhornPlan(TiledPlan):
    """Sinkhorn: find the log-potentials of the keys block by block; the rest is softmax attention."""

    def passes(self) -> int:
        assert isinstance(self.exact.normalizer, Sinkhorn)
        return 2 * self.exact.normalizer.max_iterations

    def run(self) -> Tensor:
        exact, parts = self.exact, self.parts
        assert isinstance(exact.normalizer, Sinkhorn)
        shares = query_shares(exact.log_queries, exact.query_count, exact.values).unsqueeze(-1)

        def column_mass(log_keys: Tensor) -> Tensor:
            weighted = parts.replace(queries=(parts.queries, shares), log_counts=log_keys.unsqueeze(-1))
            return map_rows(_column_mass, weighted, self.tiling, summed=True).squeeze(-1)

        start = key_shares(exact.log_counts, exact.key_count, exact.values).expand(*exact.batch_shape, -1)
        log_keys = exact.normalizer.balance(column_mass, start)
        return select(exact.replace(normalizer=Softmax(), log_counts=log_keys)).run().to(self.problem.dtype)

    def free_energy(self) -> Tensor:
        """The rows are coupled: all of them are needed at once."""
        return ReferenceEngine().plan(self.exact).free_energy()


def _make_parts(problem: Problem, reduction: Reduction | Refused) -> Parts:
    """A dot product where the scores are one without biases on pairs, else the potential's own fast form."""
    if isinstance(reduction, Reduction) and not reduction.residues:
        potential, queries, keys = Reduced.of(reduction)
    else:
        potential, queries, keys = fast_form.one(problem.potential, problem.queries, problem.keys)
    counts = None if problem.log_counts is None else problem.log_counts.unsqueeze(-1)
    return Parts(potential, _with_fixed_count(problem), queries, keys, counts, problem.values)


def _with_fixed_count(problem: Problem) -> Normalizer:
    """The normalizer, such that it does not matter how many keys a block holds."""
    normalizer = problem.normalizer
    if not isinstance(normalizer, (Sigmoid, Exponential)) or normalizer.bias is not None:
        return normalizer
    shift = normalizer.shift(problem.values.mT, Reference(problem.log_counts))
    return normalizer.replace(bias=shift[..., 0, 0] if isinstance(shift, Tensor) else shift)


def _weigh(parts: Parts, allowed: Tensor | None) -> Tensor:
    """The outputs of one block, (..., rows, e)."""
    scores = parts.potential.pair(parts.queries, parts.keys)
    return parts.normalizer.weights(scores, parts.reference(allowed)) @ parts.values


def _maximize(parts: Parts, allowed: Tensor | None) -> Tensor:
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
