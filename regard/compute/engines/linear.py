"""Feature kernels in O(n): sums over keys are taken once, or once a chunk under a causal support."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard._refused import Refused
from regard.compute.engine import Engine, Plan, Prediction, register, working_dtype
from regard.compute.problem import Problem, SupportParts
from regard.normalizers import FeatureKernel, Softmax

CHUNK = 128
"""Rows that are compared directly under a causal support before their keys join the running sum."""


@register
@dataclass(frozen=True, eq=False, repr=False)
class Linear(Engine):
    """φ(Q) (φ(K)ᵀ V) with the sums in the right order: never an m × n matrix.

    Examples:
        >>> from regard.engines import LinearEngine
        >>> linear = regard.Attention(regard.Dot(), normalizer=regard.LinearKernel(regard.normalizers.Elu()))
        >>> isinstance(regard.explain(linear, torch.randn(8, 4)).engine, LinearEngine)
        True
    """

    name: ClassVar[str] = "linear"
    rank: ClassVar[int] = 5

    def plan(self, problem: Problem) -> LinearPlan | Refused:
        """The keys that everyone sees, with their biases."""
        if not isinstance(problem.potential, FeatureKernel) or not isinstance(problem.normalizer, Softmax):
            return Refused("sums over keys can only be taken once for a LinearKernel.")
        parts = SupportParts.of(problem.support)
        if parts.rest:
            return Refused(
                f"{type(parts.rest[0]).__name__} masks pairs, so sums over keys differ from query to query."
            )
        if parts.causal and (not problem.in_order() or problem.query_count != problem.key_count):
            return Refused("running sums need queries and keys in one common order.")
        if problem.query_count == 0 or problem.key_count == 0:
            return Refused("there is nothing to sum.")
        exact = problem.to(working_dtype(problem.dtype))
        bias = exact.keys[1] if exact.log_counts is None else exact.keys[1] + exact.log_counts.unsqueeze(-1)
        for padding in parts.padding:
            bias = bias.masked_fill(~padding.allows_keys(exact.columns()).unsqueeze(-1), -math.inf)
        return LinearPlan(self, problem, exact, bias, CHUNK if parts.causal else None)


@dataclass(frozen=True, eq=False, repr=False)
class LinearPlan(Plan):
    """Sums over keys.

    What is decided here: the dtype, that of the problem `exact`; the log-weight of each key (`bias`, -inf
    where padding hides it); and whether sums run over all keys, or over the past in chunks of so many rows
    (`chunk`).
    """

    exact: Problem
    bias: Tensor
    chunk: int | None

    def run(self) -> Tensor:
        sums, _ = self._sum_keys()
        total, mass = sums[..., :-1], sums[..., -1:]
        seen = mass != 0
        out = torch.where(
            seen, total / torch.where(seen, mass, torch.ones_like(mass)), torch.zeros_like(total)
        )
        return out.to(self.problem.dtype)

    def free_energy(self) -> Tensor:
        sums, level = self._sum_keys()
        mass = sums[..., -1]
        seen = mass > 0
        rows = level.squeeze(-1) + self.exact.queries[1].squeeze(-1)
        energy = torch.where(seen, mass, torch.ones_like(mass)).log() + rows
        return energy.masked_fill(~seen, -math.inf)

    def predict(self) -> Prediction:
        problem = self.problem
        features, width = problem.queries[0].shape[-1], problem.values.shape[-1] + 1
        tokens = math.prod(problem.batch_shape) * (problem.query_count + problem.key_count)
        flops = 2.0 * tokens * features * width + 2.0 * tokens * (self.chunk or 0) * (features + width)
        how = "sums over all keys" if self.chunk is None else f"running sums in chunks of {self.chunk} rows"
        kind = str(self.exact.dtype).removeprefix("torch.")
        return Prediction(flops, 4.0 * tokens * width, f"{how}, {features} features in {kind}")

    def _sum_keys(self) -> tuple[Tensor, Tensor]:
        """[Σ_j κ_ij v_j, Σ_j κ_ij] e^{-level_i}, (..., m, e + 1), and the levels (..., m or 1, 1)."""
        (queries, _), (keys, _), values, bias = (
            self.exact.queries,
            self.exact.keys,
            self.exact.values,
            self.bias,
        )
        augmented = torch.cat([values, torch.ones_like(values[..., :1])], -1)
        if self.chunk is not None:
            return _sum_past(queries, keys, bias, augmented, self.chunk)
        level = _finite(bias.detach().amax(-2, keepdim=True))
        return queries @ (keys.mT @ ((bias - level).exp() * augmented)), level


def _sum_past(
    queries: Tensor, keys: Tensor, bias: Tensor, values: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Σ_{j≤i} (φ(q_i)·φ(k_j)) e^{bias_j - level_i} v_j, chunk by chunk, and the levels.

    Each row has its own level, the largest bias it has seen, so that a late large key hides no early one.
    """
    state, height = None, torch.full_like(bias[..., :1, :], -math.inf)
    outputs, levels = [], []
    for low in range(0, queries.shape[-2], chunk):
        some = slice(low, low + chunk)
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
    """Levels with zero in place of -inf, so that differences of levels are numbers."""
    return torch.where(level == -math.inf, torch.zeros_like(level), level)
