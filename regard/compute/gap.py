"""law_gap: the KL divergence of a given law from the attention row, from free energies, block by block."""

from __future__ import annotations

import math

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard import _check
from regard import attention as declared
from regard.attention import Attention
from regard.compute.application import problem_of
from regard.compute.engine import working_dtype
from regard.compute.kernel.tiles import Tiling, rows_per_tile
from regard.compute.selection import select
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.normalizers import Softmax
from regard.normalizers.base import Reference, entropy_term, expectation


@declared.law_gap.rule(Attention)
def _law_gap(
    attention: Attention, law: Tensor, x: Measure | Tensor, context: Measure | Tensor | None
) -> Tensor:
    """max_ν {ν(a) - T KL(ν | μ)} - {law(a) - T KL(law | μ)}, over the temperature T: KL(law | Ψ_G(μ))."""
    problem = problem_of(attention, x, context)
    problem = problem.to(working_dtype(problem.dtype))
    if not isinstance(problem.normalizer, Softmax):
        raise ArgumentError(
            "normalizer",
            f"is {type(problem.normalizer).__name__}",
            "the KL gap is a statement about softmax rows",
        )
    if law.shape[-2:] != (problem.query_count, problem.key_count):
        raise ArgumentError(
            "law",
            f"has shape {list(law.shape)}",
            f"give rows on the keys: (..., {problem.query_count}, {problem.key_count})",
        )
    if _check.holds(((law.sum(-1) - 1).abs() > 1e-3).any() | (law < 0).any()):
        raise ArgumentError(
            "law", "has rows that are not probability laws", "give non-negative rows that sum to one"
        )
    energy = select(problem).free_energy()
    temperature = problem.normalizer.temperature
    factor = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    rows = rows_per_tile(
        max(1, problem.batch_shape.numel()),
        problem.key_count,
        problem.potential.width(problem.queries, problem.keys),
    )
    tiling = Tiling(problem.support, problem.rows(), problem.columns(), rows, False)
    gaps = []
    for tile in tiling:
        some = law[..., tile.rows, :].to(problem.dtype)
        scores = problem.potential.pair(
            pytree.tree_map(lambda t, tile=tile: t[..., tile.rows, :], problem.queries), problem.keys
        )
        reference = Reference(problem.log_counts, tiling.allowed(tile))
        outside = torch.where(reference.present(scores), torch.zeros_like(some), some).sum(-1) > 0
        reached = expectation(some, scores) - factor * entropy_term(some, problem.log_counts).sum(-1)
        gaps.append(((energy[..., tile.rows] - reached) / factor).clamp_min(0).masked_fill(outside, math.inf))
    return torch.cat(gaps, -1) if gaps else energy
