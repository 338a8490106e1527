"""The fused form: softmax attention as softmax(scale · q kᵀ + bias) v, with masks that the kernel can take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._object import Object
from regard._transforms import moves
from regard._types import over_scores
from regard.compute.engine import working_dtype
from regard.compute.precision import loses_digits
from regard.compute.problem import Problem, SupportParts
from regard.compute.tiles import Tiling, rows_of
from regard.normalizers import Softmax
from regard.potentials import Scaled
from regard.potentials.reductions import Reduction, Residue


@dataclass(frozen=True, eq=False, repr=False)
class FusedForm(Object):
    """queries (..., m, c), keys (..., n, c), values (..., n, e), bias (..., n); the tiling brings masks that are more than causal."""

    problem: Problem
    reduction: Reduction
    queries: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor | None
    tiling: Tiling | None
    causal: bool
    scale: float


def not_fused(problem: Problem) -> str | None:
    """Why a problem has no fused form, as a sentence."""
    if not isinstance(problem.normalizer, Softmax):
        return f"the fused kernel normalizes by softmax, not by {type(problem.normalizer).__name__}."
    reduction = problem.reduction
    if isinstance(reduction, str):
        return reduction
    if any(isinstance(t, Tensor) and moves(t) for t in pytree.tree_leaves(residues(problem, reduction))):
        return "the fused kernel gives no derivative to a bias on pairs of positions."
    return None


def fused_form(problem: Problem) -> FusedForm:
    """For a problem that has one."""
    reduction = reduction_of(problem)
    problem, reduction = _with_enough_digits(problem, reduction)
    temperature = temperature_of(problem)
    scale, queries, bias = reduction.scale, reduction.queries, reduction.key_bias
    if isinstance(scale, Tensor) or isinstance(temperature, Tensor):
        queries, scale = queries * over_scores(scale) / over_scores(temperature), 1.0
    else:
        scale = scale / temperature
    if not isinstance(scale, Tensor) and scale <= 0:  # the kernel masks before it scales, and finds the gradient of a bias over the scale
        queries, scale = (-queries, -scale) if scale < 0 else (queries * 0, 1.0)
    if bias is not None:
        bias = bias / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    parts = SupportParts.of(problem.support)
    tiling = tiling_of(problem, reduction)
    bias = _key_bias(problem, bias, parts if tiling is None else None, queries)
    batch = problem.batch_shape
    queries = queries.expand(*batch, -1, -1)
    keys, values = reduction.keys.to(queries.dtype), problem.values.to(queries.dtype)
    return FusedForm(problem, reduction, queries, keys, values, bias, tiling, parts.causal, float(scale))


def reduction_of(problem: Problem) -> Reduction:
    """For a problem that was not refused."""
    assert isinstance(problem.reduction, Reduction)
    return problem.reduction


def temperature_of(problem: Problem) -> Any:
    assert isinstance(problem.normalizer, Softmax)
    return problem.normalizer.temperature


def _with_enough_digits(problem: Problem, reduction: Reduction) -> tuple[Problem, Reduction]:
    """Half precision with biases in float32; float64 where the terms of a score cancel."""
    kind = reduction.queries.dtype
    if reduction.key_bias is not None or reduction.residues or problem.log_counts is not None:
        kind = working_dtype(kind)
    if kind == torch.float32 and loses_digits(problem):
        problem = problem.to(torch.float64)
        return problem, reduction_of(problem)
    kind = working_dtype(problem.dtype) if kind == torch.float64 else kind
    if kind != reduction.queries.dtype:
        bias = None if reduction.key_bias is None else reduction.key_bias.to(kind)
        reduction = reduction.replace(queries=reduction.queries.to(kind), keys=reduction.keys.to(kind), key_bias=bias)
    return problem, reduction


def tiling_of(problem: Problem, reduction: Reduction) -> Tiling | None:
    """Blocks of rows, where the mask or the bias is more than a causal flag and a bias on keys."""
    parts = SupportParts.of(problem.support)
    plain = len(parts.rest) == 0 and len(reduction.residues) == 0 and (not parts.causal or problem.in_order())
    if plain:
        return None
    batch = max(1, math.prod(problem.batch_shape))
    rows = min(max(32, rows_of(batch, problem.key_count, 1)), 256)
    return Tiling(problem.support, problem.rows(), problem.columns(), rows, problem.in_order(), residues(problem, reduction))


def residues(problem: Problem, reduction: Reduction) -> tuple[Residue, ...]:
    """The position biases over temperature."""
    inverse = 1 / temperature_of(problem)
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
