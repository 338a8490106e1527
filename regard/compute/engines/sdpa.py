"""The fused kernel, for every potential that is a dot product plus a key bias."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from regard._transforms import moves
from regard._types import over_scores
from regard.compute.engine import Engine, Prediction, pairs, register, row_empty, working_dtype
from regard.compute.flash import flash
from regard.compute.precision import loses_digits
from regard.compute.problem import Problem, SupportParts
from regard.compute.tiles import Tiling, rows_of
from regard.normalizers import Softmax
from regard.potentials import Scaled
from regard.potentials.reductions import Reduction, Residue
from regard.supports import And, Full


@register
@dataclass(frozen=True, eq=False, repr=False)
class Sdpa(Engine):
    """torch's fused kernel (CPU flash): softmax of Dot, Bilinear, Gaussian, Cosine, Rotary of these, position biases, sums.

    Where terms of the score would cancel (a Gaussian much narrower than the points are spread) it computes in float64. That
    needs a look at the data, which is not possible under torch.compile and vmap; there it stays in the dtype of the inputs.
    """

    name: ClassVar[str] = "sdpa"
    rank: ClassVar[int] = 10

    def refuse(self, problem: Problem) -> str | None:
        if not isinstance(problem.normalizer, Softmax):
            return f"the fused kernel normalizes by softmax, not by {type(problem.normalizer).__name__}."
        reduction = problem.reduction
        if isinstance(reduction, str):
            return reduction
        moving = pytree.tree_leaves(_residues(problem, reduction))
        if any(isinstance(t, Tensor) and moves(t) for t in moving):
            return "the fused kernel gives no derivative to a bias on pairs of positions."
        return None

    def run(self, problem: Problem) -> Tensor:
        return self._compute(problem)[0].to(problem.dtype)

    def free_energy(self, problem: Problem) -> Tensor:
        _, lse, reduction = self._compute(problem.change(values=problem.values[..., :1]))
        temperature = _temperature(problem)
        energy = (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature) * lse
        energy = energy if reduction.row_bias is None else energy + reduction.row_bias()
        if isinstance(problem.support, Full) and problem.log_counts is None:
            return energy
        return energy.masked_fill(_empty_rows(problem), -math.inf)

    def predict(self, problem: Problem) -> Prediction:
        reduction = _reduction(problem)
        width = max(reduction.queries.shape[-1], problem.values.shape[-1], 16)
        share = 0.5 if SupportParts.of(problem.support).causal else 1.0
        count = pairs(problem)
        tile = 0.0 if _tiling(problem, reduction) is None else 4 * count / max(problem.query_count, 1) * 256
        return Prediction(share * count * (4 * width + 5), tile + 4.0 * math.prod(problem.batch_shape) * problem.query_count * (width + 1))

    def _compute(self, problem: Problem) -> tuple[Tensor, Tensor, Reduction]:
        reduction = _reduction(problem)
        problem, reduction = _with_enough_digits(problem, reduction)
        temperature = _temperature(problem)
        scale, queries, bias = reduction.scale, reduction.queries, reduction.key_bias
        if isinstance(scale, Tensor) or isinstance(temperature, Tensor):
            queries, scale = queries * over_scores(scale) / over_scores(temperature), 1.0
        else:
            scale = scale / temperature
        if not isinstance(scale, Tensor) and scale == 0:  # the gradient of a bias is found over the scale
            queries, scale = queries * 0, 1.0
        if bias is not None:
            bias = bias / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
        parts = SupportParts.of(problem.support)
        tiling = _tiling(problem, reduction)
        bias = _key_bias(problem, bias, parts if tiling is None else None, queries)
        batch = problem.batch_shape
        queries = queries.expand(*batch, -1, -1)
        if problem.device.type != "cpu":
            return *_elsewhere(problem, queries, reduction, bias, float(scale)), reduction
        out, lse = flash(
            queries, reduction.keys.to(queries.dtype), problem.values.to(queries.dtype), bias, tiling, parts.causal, float(scale)
        )
        return out, lse, reduction


def _reduction(problem: Problem) -> Reduction:
    """For a problem that was not refused."""
    assert isinstance(problem.reduction, Reduction)
    return problem.reduction


def _temperature(problem: Problem) -> Any:
    assert isinstance(problem.normalizer, Softmax)
    return problem.normalizer.temperature


def _with_enough_digits(problem: Problem, reduction: Reduction) -> tuple[Problem, Reduction]:
    """Half precision with biases in float32; float64 where the terms of a score cancel."""
    kind = reduction.queries.dtype
    if reduction.key_bias is not None or reduction.residues or problem.log_counts is not None:
        kind = working_dtype(kind)
    if kind == torch.float32 and loses_digits(problem):
        problem = problem.to(torch.float64)
        return problem, _reduction(problem)
    kind = working_dtype(problem.dtype) if kind == torch.float64 else kind
    if kind != reduction.queries.dtype:
        bias = None if reduction.key_bias is None else reduction.key_bias.to(kind)
        reduction = reduction.replace(queries=reduction.queries.to(kind), keys=reduction.keys.to(kind), key_bias=bias)
    return problem, reduction


def _tiling(problem: Problem, reduction: Reduction) -> Tiling | None:
    """Blocks of rows, where the mask or the bias is more than a causal flag and a bias on keys."""
    parts = SupportParts.of(problem.support)
    plain = len(parts.rest) == 0 and len(reduction.residues) == 0 and (not parts.causal or problem.in_order())
    if plain:
        return None
    batch = max(1, math.prod(problem.batch_shape))
    rows = min(max(32, rows_of(batch, problem.key_count, 1)), 256)
    return Tiling(problem.support, problem.rows(), problem.columns(), rows, problem.in_order(), _residues(problem, reduction))


def _residues(problem: Problem, reduction: Reduction) -> tuple[Residue, ...]:
    """The position biases over temperature."""
    inverse = 1 / _temperature(problem)
    return tuple(Residue(Scaled(r.potential, inverse), r.queries, r.keys) for r in reduction.residues)


def _key_bias(problem: Problem, bias: Tensor | None, parts: SupportParts | None, like: Tensor) -> Tensor | None:
    """Everything that depends on the key alone, (..., n)."""
    if problem.log_counts is not None:
        counts = problem.log_counts.to(like.dtype)
        bias = counts if bias is None else bias + counts
    if parts is not None and parts.padding:
        allowed = torch.ones_like(problem.columns(), dtype=torch.bool)
        for padding in parts.padding:
            allowed = allowed & padding.allows_keys(problem.columns())
        start = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device) if bias is None else bias
        bias = start.masked_fill(~allowed, -math.inf)
    return None if bias is None else bias.to(like.dtype)


def _empty_rows(problem: Problem) -> Tensor:
    """Which queries see nothing, in blocks of rows."""
    return torch.cat([row_empty(problem, slice(low, low + 256)) for low in range(0, max(problem.query_count, 1), 256)], -1)


def _elsewhere(problem: Problem, queries: Tensor, reduction: Reduction, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Other devices: torch's public door with one additive mask; the log-sum-exp is not available there."""
    tiling = Tiling(
        And((problem.support,)), problem.rows(), problem.columns(), max(problem.query_count, 1), False, _residues(problem, reduction)
    )
    mask = tiling.bias(next(iter(tiling)), queries.dtype)
    mask = mask if bias is None else bias.unsqueeze(-2) if mask is None else mask + bias.unsqueeze(-2)
    out = F.scaled_dot_product_attention(queries, reduction.keys, problem.values.to(queries.dtype), attn_mask=mask, scale=scale)
    scores = scale * queries @ reduction.keys.mT
    return out, (scores if mask is None else scores + mask).logsumexp(-1)
