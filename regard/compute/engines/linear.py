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
        sums, _ = self._sums(problem.to(working_dtype(problem.dtype)))
        total, mass = sums[..., :-1], sums[..., -1:]
        seen = mass != 0
        return torch.where(seen, total / torch.where(seen, mass, torch.ones_like(mass)), torch.zeros_like(total)).to(problem.dtype)

    def free_energy(self, problem: Problem) -> Tensor:
        exact = problem.to(working_dtype(problem.dtype))
        sums, level = self._sums(exact)
        mass = sums[..., -1]
        seen = mass > 0
        energy = torch.where(seen, mass, torch.ones_like(mass)).log() + level.squeeze(-1) + exact.queries[1].squeeze(-1)
        return energy.masked_fill(~seen, -math.inf)

    def predict(self, problem: Problem) -> Prediction:
        features, width = problem.queries[0].shape[-1], problem.values.shape[-1] + 1
        tokens = math.prod(problem.batch_shape) * (problem.query_count + problem.key_count)
        chunk = CHUNK if SupportParts.of(problem.support).causal else 0
        return Prediction(2.0 * tokens * features * width + 2.0 * tokens * chunk * (features + width), 4.0 * tokens * width)

    def _sums(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """[Σ_j κ_ij v_j, Σ_j κ_ij] e^{-level_i} for each query, (..., m, e + 1), and the levels (..., m or 1, 1)."""
        (queries, _), (keys, bias) = problem.queries, problem.keys
        bias = bias if problem.log_counts is None else bias + problem.log_counts.unsqueeze(-1)
        parts = SupportParts.of(problem.support)
        for padding in parts.padding:
            bias = bias.masked_fill(~padding.allows_keys(problem.columns()).unsqueeze(-1), -math.inf)
        augmented = torch.cat([problem.values, torch.ones_like(problem.values[..., :1])], -1)
        if parts.causal:
            return _running(queries, keys, bias, augmented)
        level = _finite(bias.detach().amax(-2, keepdim=True))
        return queries @ (keys.mT @ ((bias - level).exp() * augmented)), level


def _running(queries: Tensor, keys: Tensor, bias: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_{j≤i} (φ(q_i)·φ(k_j)) e^{bias_j} v_j, chunk by chunk; each row has its own level, so that a late large key hides no early one."""
    state, height = None, torch.full_like(bias[..., :1, :], -math.inf)
    outputs, levels = [], []
    for low in range(0, queries.shape[-2], CHUNK):
        some = slice(low, low + CHUNK)
        q, k, v, b = (t[..., some, :] for t in (queries, keys, values, bias))
        past = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        visible = b.mT.expand(*b.shape[:-2], q.shape[-2], k.shape[-2]).masked_fill(~past, -math.inf)
        level = _finite(torch.maximum(visible.detach().amax(-1, keepdim=True), height))
        near = ((q @ k.mT) * (visible - level).exp()) @ v
        outputs.append(near if state is None else near + (height - level).exp() * (q @ state))
        levels.append(level.expand(*outputs[-1].shape[:-1], 1))
        higher = torch.maximum(height, b.detach().amax(-2, keepdim=True))
        added = k.mT @ ((b - _finite(higher)).exp() * v)
        state = added if state is None else state * (height - _finite(higher)).exp() + added
        height = higher
    return torch.cat(outputs, -2), torch.cat(levels, -2)


def _finite(level: Tensor) -> Tensor:
    return torch.where(level == -math.inf, torch.zeros_like(level), level)
