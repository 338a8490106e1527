"""Sparse laws: alpha-entmax and its end point sparsemax, by Newton iteration on the threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.normalizers.base import Normalizer, Reference, expected, without_empty_rows
from regard.normalizers.softmax import Softmax


@dataclass(frozen=True, eq=False, repr=False)
class Entmax(Normalizer):
    """p_j = c_j [(α-1) s_j - θ]_+^{1/(α-1)}: the law that maximizes ⟨p, s⟩ + H_α(p), H_α the Tsallis entropy (peters2019).

    α = 1 is softmax, α = 2 sparsemax. Unlike softmax it counts: a key that counts twice is two equal keys.
    """

    alpha: float = 1.5
    laws: ClassVar[bool] = True
    variational: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (isinstance(self.alpha, (int, float)) and math.isfinite(self.alpha) and self.alpha >= 1):
            raise ArgumentError("alpha", f"is {self.alpha}", "give a number ≥ 1: 1 is softmax, 1.5 the usual sparse law, 2 sparsemax")

    def weights(self, scores: Tensor, reference: Reference) -> Tensor:
        if self.alpha == 1:
            return Softmax().weights(scores, reference)
        return sparse_law(scores, reference, float(self.alpha))

    def objective(self, weights: Tensor, scores: Tensor, reference: Reference) -> Tensor:
        if self.alpha == 1:
            return Softmax().objective(weights, scores, reference)
        density, counts = _density(weights, reference.log_counts)
        return expected(weights, scores) + (counts * (density - density**self.alpha)).sum(-1) / (self.alpha * (self.alpha - 1))


@dataclass(frozen=True, eq=False, repr=False)
class Sparsemax(Normalizer):
    """p_j = c_j [s_j - θ]_+: the Euclidean projection of the scores on the simplex, maximizing ⟨p, s⟩ - |p|²/2 (martins2016)."""

    laws: ClassVar[bool] = True
    variational: ClassVar[bool] = True

    def weights(self, scores: Tensor, reference: Reference) -> Tensor:
        return sparse_law(scores, reference, 2.0)

    def objective(self, weights: Tensor, scores: Tensor, reference: Reference) -> Tensor:
        density, counts = _density(weights, reference.log_counts)
        return expected(weights, scores) - 0.5 * (counts * density.square()).sum(-1)


def _density(weights: Tensor, log_counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """p_j / c_j and c_j; a key that counts zero has density zero."""
    if log_counts is None:
        return weights, torch.ones_like(weights)
    counts = log_counts.exp().unsqueeze(-2).expand(weights.shape)
    return torch.where(counts > 0, weights / torch.where(counts > 0, counts, torch.ones_like(counts)), torch.zeros_like(weights)), counts


def sparse_law(scores: Tensor, reference: Reference, alpha: float) -> Tensor:
    """The alpha-entmax law of each row, zero for empty rows."""
    log_counts = reference.log_counts
    allowed = reference.supported(scores)
    if log_counts is not None:
        allowed = allowed.masked_fill((log_counts == -math.inf).unsqueeze(-2), -math.inf)
    filled, empty = without_empty_rows(allowed)
    return _SparseLaw.apply(filled, log_counts, alpha).masked_fill(empty, 0.0)  # type: ignore[no-any-return]


class _SparseLaw(torch.autograd.Function):
    """The law and its derivative: J = diag(t) - t tᵀ / Σt with t_j = c_j (p_j / c_j)^{2-α} on the support."""

    @staticmethod
    def forward(scores: Tensor, log_counts: Tensor | None, alpha: float) -> Tensor:
        return solve_threshold(scores, log_counts, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: Tensor) -> None:
        _, log_counts, ctx.alpha = inputs
        ctx.has_counts = log_counts is not None
        ctx.save_for_backward(output, *(() if log_counts is None else (log_counts,)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        law = ctx.saved_tensors[0]
        log_counts = ctx.saved_tensors[1] if ctx.has_counts else None
        density, counts = _density(law, log_counts)
        inside = density > 0
        slope = torch.where(inside, counts * torch.where(inside, density, torch.ones_like(density)) ** (2 - ctx.alpha), torch.zeros_like(law))
        level = (slope * gradient).sum(-1, keepdim=True) / slope.sum(-1, keepdim=True)
        by_counts = (law * (gradient - level)).sum(-2) if log_counts is not None else None
        if by_counts is not None and log_counts is not None:
            by_counts = by_counts.sum_to_size(log_counts.shape)
        return slope * (gradient - level), by_counts, None


def solve_threshold(scores: Tensor, log_counts: Tensor | None, alpha: float) -> Tensor:
    """p with Σ_j c_j [(α-1)s_j - θ]_+^k = 1, k = 1/(α-1)."""
    power = 1 / (alpha - 1)
    levels = scores * (alpha - 1) if alpha != 2 else scores
    levels = levels - levels.amax(-1, keepdim=True)  # the threshold then lies in [-1, 0] where keys count one each
    counts = None if log_counts is None else log_counts.exp().unsqueeze(-2)
    if counts is None:
        start = torch.full_like(levels[..., :1], -1.0)
    else:
        start = (levels - counts.clamp_min(torch.finfo(levels.dtype).tiny) ** (-1 / power)).amax(-1, keepdim=True)
    search = _newton if power >= 1 else _bisection
    law = _powered((levels - search(levels, counts, start, power)).clamp_min_(0), power)
    law = law if counts is None else law * counts
    return law / law.sum(-1, keepdim=True)


def _newton(levels: Tensor, counts: Tensor | None, threshold: Tensor, power: float) -> Tensor:
    """Newton on θ ↦ (Σ c_j [z_j-θ]_+^k)^{1/k} - 1, which is convex and decreasing: from the left it cannot overshoot.

    The k-th root makes it linear for one key and nearly so for many, so a few steps suffice.
    """
    tolerance = 4 * torch.finfo(levels.dtype).eps
    for _ in range(60):
        excess = (levels - threshold).clamp_min_(0)
        norm, slope = _norm_and_slope(excess, counts, power)
        step = (norm - 1) * norm ** (power - 1) / slope
        threshold = threshold + step
        if not bool((step > tolerance).any()):
            break
    return threshold


def _norm_and_slope(excess: Tensor, counts: Tensor | None, power: float) -> tuple[Tensor, Tensor]:
    """(Σ c r^k)^{1/k} and Σ c r^{k-1} along rows."""
    if counts is None and power == 2:
        return torch.linalg.vector_norm(excess, dim=-1, keepdim=True), excess.sum(-1, keepdim=True)
    if counts is None and power == 1:
        return excess.sum(-1, keepdim=True), (excess > 0).sum(-1, keepdim=True).to(excess.dtype)
    inside = excess > 0
    lower = torch.where(inside, _powered(excess, power - 1), torch.zeros_like(excess))
    lower = lower if counts is None else lower * counts
    return (lower * excess).sum(-1, keepdim=True) ** (1 / power), lower.sum(-1, keepdim=True)


def _bisection(levels: Tensor, counts: Tensor | None, low: Tensor, power: float) -> Tensor:
    """For α > 2 the root is not convex in θ; halve the bracket to rounding instead."""
    high = torch.zeros_like(low)
    for _ in range(2 + round(-math.log2(torch.finfo(levels.dtype).eps))):
        middle = 0.5 * (low + high)
        mass = _powered((levels - middle).clamp_min_(0), power)
        mass = (mass if counts is None else mass * counts).sum(-1, keepdim=True)
        low, high = torch.where(mass >= 1, middle, low), torch.where(mass >= 1, high, middle)
    return low


def _powered(base: Tensor, power: float) -> Tensor:
    return base if power == 1 else base.square() if power == 2 else base**power
