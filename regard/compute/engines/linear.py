"""Feature kernels in O(n): sums over keys are taken once, or once a chunk under a causal support."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.compute.engine import Engine, Prediction, register, working_dtype
from regard.compute.problem import Problem, SupportParts
from regard.normalizers import FeatureKernel, Softmax

CHUNK = 128
"""Rows that are compared directly under a causal support before their keys join the running sum."""


@register
@dataclass(frozen=True, eq=False, repr=False)
class Linear(Engine):
    """φ(Q) (φ(K)ᵀ V) with the sums in the right order: never an m × n matrix."""

    name: ClassVar[str] = "linear"
    rank: ClassVar[int] = 5

    def refuse(self, problem: Problem) -> str | None:
        if not isinstance(problem.potential, FeatureKernel) or not isinstance(problem.normalizer, Softmax):
            return "sums over keys can only be taken once for a LinearKernel."
        parts = SupportParts.of(problem.support)
        if parts.rest:
            return f"{type(parts.rest[0]).__name__} masks pairs, so sums over keys differ from query to query."
        if parts.causal and (not problem.in_order() or problem.query_count != problem.key_count):
            return "running sums need queries and keys in one common order."
        if problem.query_count == 0 or problem.key_count == 0:
            return "there is nothing to sum."
        return None

    def run(self, problem: Problem) -> Tensor:
        exact = problem.to(working_dtype(problem.dtype))
        sums = self._sums(exact)
        total, mass = sums[..., :-1], sums[..., -1:]
        seen = mass > 0
        return torch.where(seen, total / torch.where(seen, mass, torch.ones_like(mass)), torch.zeros_like(total)).to(problem.dtype)

    def free_energy(self, problem: Problem) -> Tensor:
        exact = problem.to(working_dtype(problem.dtype))
        mass = self._sums(exact)[..., -1]
        (_, row_bias), (_, key_bias) = exact.queries, exact.keys
        top = self._top(exact, key_bias)
        return mass.log() + row_bias.squeeze(-1) + top.squeeze(-1)

    def predict(self, problem: Problem) -> Prediction:
        features, width = problem.queries[0].shape[-1], problem.values.shape[-1] + 1
        tokens = math.prod(problem.batch_shape) * (problem.query_count + problem.key_count)
        chunk = CHUNK if SupportParts.of(problem.support).causal else 0
        return Prediction(2.0 * tokens * features * width + 2.0 * tokens * chunk * (features + width), 4.0 * tokens * width)

    def _top(self, problem: Problem, key_bias: Tensor) -> Tensor:
        bias = key_bias if problem.log_counts is None else key_bias + problem.log_counts.unsqueeze(-1)
        top = bias.detach().amax(-2, keepdim=True)
        return torch.where(top == -math.inf, torch.zeros_like(top), top)

    def _sums(self, problem: Problem) -> Tensor:
        """[Σ_j κ_ij v_j, Σ_j κ_ij] for each query, (..., m, e + 1)."""
        (queries, _), (keys, key_bias) = problem.queries, problem.keys
        parts = SupportParts.of(problem.support)
        bias = key_bias - self._top(problem, key_bias)
        bias = bias if problem.log_counts is None else bias + problem.log_counts.unsqueeze(-1)
        weight = bias.exp()
        for padding in parts.padding:
            weight = weight * padding.allows_keys(problem.columns()).unsqueeze(-1)
        augmented = torch.cat([problem.values, torch.ones_like(problem.values[..., :1])], -1) * weight
        return _running(queries, keys, augmented) if parts.causal else queries @ (keys.mT @ augmented)


def _running(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Σ_{j≤i} (φ(q_i)·φ(k_j)) v_j, chunk by chunk."""
    state: Tensor | None = None
    outputs = []
    for low in range(0, queries.shape[-2], CHUNK):
        some = slice(low, low + CHUNK)
        q, k, v = queries[..., some, :], keys[..., some, :], values[..., some, :]
        near = (q @ k.mT).tril() @ v
        outputs.append(near if state is None else near + q @ state)
        state = k.mT @ v if state is None else state + k.mT @ v
    return torch.cat(outputs, -2)
