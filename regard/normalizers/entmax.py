"""Sparse laws: alpha-entmax and its end point sparsemax, by Newton iteration on the threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard import _check
from regard._transforms import forward_rule, is_recorded
from regard._types import Scalar, over_scores
from regard.errors import ArgumentError
from regard.normalizers.base import Normalizer, Reference, expectation, without_empty_rows, zero_where
from regard.normalizers.softmax import Softmax
from regard.parameters import number

LARGEST = 8
"""The largest alpha: above it float64 does not resolve small weights."""
_TOO_LARGE = f"give at most {LARGEST}: above it rounding changes weights by a percent and more"


@dataclass(frozen=True, eq=False, repr=False)
class Entmax(Normalizer):
    """p_j = c_j [(α-1) s_j - θ]_+^{1/(α-1)}: the law that maximizes ⟨p, s⟩ + H_α(p), H_α the Tsallis entropy
    (peters2019).

    α = 1 is softmax, α = 2 sparsemax, 8 the largest: float64 does not resolve weights below
    2^{-52/(α-1)}, which is 0.6 % at 8 and one half at 50. A tensor has one α > 1 for each head, and a
    gradient (correia2019). Unlike softmax it counts: a key that counts twice is two equal keys.

    Examples:
        >>> scores = regard.PairBias(torch.tensor([[4.0, 0.0, 0.0]]))
        >>> sparse = regard.Attention(scores, normalizer=regard.Entmax(1.5))
        >>> sparse.weights(torch.zeros(1, 1), torch.zeros(3, 1)).tolist()
        [[1.0, 0.0, 0.0]]
    """

    alpha: Scalar = number(default=1.5)
    laws: ClassVar[bool] = True
    variational: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.alpha, Tensor):
            _check.number("alpha", self.alpha)
            if _check.holds((self.alpha <= 1).any()):
                raise ArgumentError(
                    "alpha", "has entries that are not above 1", "where it is learned use 1 + softplus(z)"
                )
            if _check.holds((self.alpha > LARGEST).any()):
                raise ArgumentError("alpha", f"has entries above {LARGEST}", _TOO_LARGE)
        elif not (isinstance(self.alpha, (int, float)) and self.alpha >= 1):
            raise ArgumentError(
                "alpha",
                f"is {self.alpha}",
                "give a number ≥ 1: 1 is softmax, 1.5 the usual sparse law, 2 sparsemax",
            )
        elif self.alpha > LARGEST:
            raise ArgumentError("alpha", f"is {float(self.alpha):g}", _TOO_LARGE)

    def sharp(self) -> bool:
        # p = r^k with k = 1/(α-1): for k < 1 it has infinite slope at the edge of its support, for large k it
        # multiplies rounding by k.
        if isinstance(self.alpha, Tensor):
            return _check.holds(((self.alpha > 2) | (self.alpha < 1.1)).any()) is not False
        return self.alpha > 2 or 1 < self.alpha < 1.1

    def weights(self, scores: Tensor, reference: Reference) -> Tensor:
        if not isinstance(self.alpha, Tensor):
            return (
                Softmax().weights(scores, reference)
                if self.alpha == 1
                else sparse_law(scores, reference, float(self.alpha))
            )
        alpha = over_scores(self.alpha).to(scores.dtype)  # type: ignore[union-attr]
        shape = torch.broadcast_shapes(scores.shape, (*alpha.shape[:-2], 1, 1))
        return sparse_law(scores.expand(shape), reference, alpha)

    def objective(self, weights: Tensor, scores: Tensor, reference: Reference) -> Tensor:
        if not isinstance(self.alpha, Tensor) and self.alpha == 1:
            return Softmax().objective(weights, scores, reference)
        density, counts = _density(weights, reference.log_counts)
        power = over_scores(self.alpha)
        entropy = (counts * (density - density**power) / (power * (power - 1))).sum(-1)
        return expectation(weights, scores) + entropy


@dataclass(frozen=True, eq=False, repr=False)
class Sparsemax(Normalizer):
    """p_j = c_j [s_j - θ]_+: the Euclidean projection of the scores on the simplex, maximizing ⟨p,
    s⟩ - |p|²/2 (martins2016).

    Examples:
        >>> scores = regard.PairBias(torch.tensor([[1.0, 0.5, -3.0]]))
        >>> sparse = regard.Attention(scores, normalizer=regard.Sparsemax())
        >>> sparse.weights(torch.zeros(1, 1), torch.zeros(3, 1)).tolist()
        [[0.75, 0.25, 0.0]]
    """

    laws: ClassVar[bool] = True
    variational: ClassVar[bool] = True

    def weights(self, scores: Tensor, reference: Reference) -> Tensor:
        return sparse_law(scores, reference, 2.0)

    def objective(self, weights: Tensor, scores: Tensor, reference: Reference) -> Tensor:
        density, counts = _density(weights, reference.log_counts)
        return expectation(weights, scores) - 0.5 * (counts * density.square()).sum(-1)


def _density(weights: Tensor, log_counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """p_j / c_j and c_j; a key that counts zero has density zero."""
    if log_counts is None:
        return weights, torch.ones_like(weights)
    counts = log_counts.exp().unsqueeze(-2).expand(weights.shape)
    return torch.where(
        counts > 0,
        weights / torch.where(counts > 0, counts, torch.ones_like(counts)),
        torch.zeros_like(weights),
    ), counts


def sparse_law(scores: Tensor, reference: Reference, alpha: Scalar) -> Tensor:
    """The alpha-entmax law of each row, zero for empty rows; alpha: a number, or a tensor (..., 1, 1)."""
    log_counts = reference.log_counts
    allowed = reference.supported(scores)
    if log_counts is not None:
        allowed = allowed.masked_fill((log_counts == -math.inf).unsqueeze(-2), -math.inf)
    filled, empty = without_empty_rows(allowed)
    function = _TracedSparseLaw if torch.compiler.is_compiling() else _SparseLaw
    return zero_where(function.apply(filled, log_counts, alpha), empty)


class _TracedSparseLaw(torch.autograd.Function):
    """The law and its derivative: J = diag(t) - t tᵀ / Σt with t_j = c_j (p_j / c_j)^{2-α} on the support.

    torch.compile cannot trace functions that have forward mode or vmap rules; it traces this one.
    """

    @staticmethod
    def forward(scores: Tensor, log_counts: Tensor | None, alpha: Scalar) -> Tensor:
        return solve_threshold(scores, log_counts, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, Scalar], output: Tensor) -> None:
        _, log_counts, alpha = inputs
        learned = isinstance(alpha, Tensor)
        ctx.alpha, ctx.learned = (None if learned else alpha), learned
        saved = (output, *(t for t in (alpha, log_counts) if isinstance(t, Tensor)))
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        law, alpha, log_counts = _saved(ctx, ctx.saved_tensors)
        slope = _slope(law, log_counts, alpha)
        level = _mean(slope, gradient)
        by_counts = None
        if log_counts is not None:
            by_counts = (law * (gradient - level)).sum(-2).sum_to_size(log_counts.shape)
        by_alpha = None
        if isinstance(alpha, Tensor):
            by_alpha = ((gradient - level) * _spread(law, log_counts, alpha)).sum_to_size(alpha.shape)
        return slope * (gradient - level), by_counts, by_alpha


class _SparseLaw(_TracedSparseLaw):
    """The same with forward mode and vmap."""

    @staticmethod
    def jvp(ctx: Any, by_scores: Tensor | None, by_counts: Tensor | None, by_alpha: Any) -> Tensor:
        with forward_rule(ctx) as saved:
            law, alpha, log_counts = _saved(ctx, saved)
            slope = _slope(law, log_counts, alpha)
            change = (
                torch.zeros_like(law) if by_scores is None else slope * (by_scores - _mean(slope, by_scores))
            )
            grown = [] if by_counts is None else [law * by_counts.unsqueeze(-2)]
            grown += [] if by_alpha is None else [by_alpha * _spread(law, log_counts, alpha)]
            for part in grown:  # what moves mass by itself, for which the threshold makes room
                change = change + part - slope * part.sum(-1, keepdim=True) / _total(slope)
            return change

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], scores: Tensor, log_counts: Tensor | None, alpha: Scalar
    ) -> tuple[Tensor, int]:
        size = info.batch_size
        scores = scores.expand(size, *scores.shape) if in_dims[0] is None else scores.movedim(in_dims[0], 0)
        if log_counts is not None:
            log_counts = _mapped_beside(log_counts, in_dims[1], size, scores.ndim - 1)
        if isinstance(alpha, Tensor):
            alpha = _mapped_beside(alpha, in_dims[2], size, scores.ndim)
        return _SparseLaw.apply(scores, log_counts, alpha), 0


def _mapped_beside(value: Tensor, dim: int | None, size: int, rank: int) -> Tensor:
    """A tensor with its mapped dimension in front of as many as `rank` says."""
    value = value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
    return value.reshape(size, *(1,) * (rank - value.ndim), *value.shape[1:])


def _saved(ctx: Any, saved: tuple[Tensor, ...]) -> tuple[Tensor, Scalar, Tensor | None]:
    """The law, alpha and the log-counts."""
    law, *rest = saved
    alpha = rest.pop(0) if ctx.learned else ctx.alpha
    return law, alpha, rest[0] if rest else None


def _slope(law: Tensor, log_counts: Tensor | None, alpha: Scalar) -> Tensor:
    """t_j, how fast the mass of a key grows with its score."""
    density, counts = _density(law, log_counts)
    inside = density > 0
    return torch.where(
        inside,
        counts * torch.where(inside, density, torch.ones_like(density)) ** (2 - alpha),
        torch.zeros_like(law),
    )


def _spread(law: Tensor, log_counts: Tensor | None, alpha: Any) -> Tensor:
    """How the mass of a key grows with alpha, the threshold held: p/(α-1)² - p log(p/c)/(α-1)."""
    density = _density(law, log_counts)[0]
    logs = torch.where(density > 0, density, torch.ones_like(density)).log()
    return law * (1 / (alpha - 1) - logs) / (alpha - 1)


def _total(slope: Tensor) -> Tensor:
    return slope.sum(-1, keepdim=True).clamp_min(torch.finfo(slope.dtype).tiny)


def _mean(slope: Tensor, values: Tensor) -> Tensor:
    return (slope * values).sum(-1, keepdim=True) / _total(slope)


CHUNK = 1 << 17
"""Scores, for each thread, whose threshold is searched at once: an iteration passes over them four times,
so they must stay in cache.
"""
HALVINGS = 2
"""How many times a bracket of the threshold is halved beyond the digits of its dtype."""
COARSE = 8
"""A first search looks at the largest of every eight scores only."""


def solve_threshold(scores: Tensor, log_counts: Tensor | None, alpha: Scalar) -> Tensor:
    """p_j = c_j ((α-1) [s_j - τ]_+)^k with Σ_j p_j = 1, k = 1/(α-1)."""
    if scores.numel() == 0:
        return torch.zeros_like(scores)
    power = 1 / (alpha - 1)
    if isinstance(power, Tensor) or is_recorded(scores):
        counts = None if log_counts is None else log_counts.exp().unsqueeze(-2)
        return _solve_by_halving(scores, counts, power)
    flat = scores.reshape(-1, scores.shape[-1])
    counts = (
        None
        if log_counts is None
        else log_counts.exp().unsqueeze(-2).expand(scores.shape).reshape(flat.shape)
    )
    start = _below(flat, counts, power)
    laws = torch.empty_like(flat)
    rows = max(1, CHUNK * torch.get_num_threads() // flat.shape[-1])
    for low in range(0, flat.shape[0], rows):
        some = slice(low, low + rows)
        _solve_rows(flat[some], None if counts is None else counts[some], start[some], power, laws[some])
    return laws.reshape(scores.shape)


def _solve_by_halving(scores: Tensor, counts: Tensor | None, power: Any) -> Tensor:
    """The same laws in a fixed number of plain operations: for powers that differ, for recorded programs."""
    high = scores.amax(-1, keepdim=True)
    low = high - power
    if counts is not None:
        alone = scores - power * counts.clamp_min(torch.finfo(scores.dtype).tiny) ** (-1 / power)
        low = torch.where(counts.amax(-1, keepdim=True) > 0, alone.amax(-1, keepdim=True), low)
    for _ in range(HALVINGS + round(-math.log2(torch.finfo(scores.dtype).eps))):
        middle = 0.5 * (low + high)
        mass = ((scores - middle).clamp(min=0) / power) ** power
        enough = (mass if counts is None else mass * counts).sum(-1, keepdim=True) >= 1
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    excess = (scores - low).clamp(min=0)
    tiny = torch.finfo(scores.dtype).tiny
    law = (excess / excess.amax(-1, keepdim=True).clamp_min(tiny)) ** power
    law = law if counts is None else law * counts
    return law / law.sum(-1, keepdim=True).clamp_min(tiny)


def _below(scores: Tensor, counts: Tensor | None, power: float) -> Tensor:
    """A lower bound of each row's threshold: the threshold of any part of the row is one."""
    low = scores.amax(-1, keepdim=True) - power
    if counts is not None:  # each key alone, where any key counts
        alone = (scores - power * counts.clamp_min(torch.finfo(scores.dtype).tiny) ** (-1 / power)).amax(
            -1, keepdim=True
        )
        return torch.where(counts.amax(-1, keepdim=True) > 0, alone, low)
    blocks = scores.shape[-1] // COARSE
    if power < 1 or blocks < 32:
        return low
    largest = scores[:, : COARSE * blocks].unflatten(-1, (COARSE, blocks)).amax(-2)
    return torch.maximum(low, _newton(largest, None, low, power, torch.empty_like(largest), 0.02))


def _solve_rows(scores: Tensor, counts: Tensor | None, start: Tensor, power: float, laws: Tensor) -> None:
    """The laws of some rows, written to `laws`, which also serves as the buffer of the search."""
    if power >= 1:
        eps = torch.finfo(scores.dtype).eps
        # A step h leaves an error of order h² where the function has a bounded second derivative (k ≥ 2),
        # else of order h.
        threshold = _newton(
            scores, counts, start, power, laws, 0.25 * math.sqrt(eps) if power >= 2 else 4 * eps
        )
    else:
        threshold = _bisection(scores, counts, start, power, laws)
    excess = torch.sub(scores, threshold, out=laws).clamp_(min=0)
    law = _raise_to(
        excess if power in (1, 2) else excess / excess.amax(-1, keepdim=True), power
    )  # a large power must not overflow
    law = law if counts is None else law * counts
    torch.div(
        law, law.sum(-1, keepdim=True).clamp_min(torch.finfo(law.dtype).tiny), out=laws
    )  # a row without mass stays zero


def _newton(
    scores: Tensor, counts: Tensor | None, threshold: Tensor, power: float, buffer: Tensor, tolerance: float
) -> Tensor:
    """Newton on τ ↦ (Σ c_j [s_j-τ]_+^k)^{1/k} - k, which is convex and decreasing: from the left it cannot
    overshoot.

    The k-th root makes it linear for one key and nearly so for many, so a few steps suffice.
    """
    for _ in range(60):
        excess = torch.sub(scores, threshold, out=buffer).clamp_(min=0)
        norm, inverse_slope = _norm_and_inverse_slope(excess, counts, power)
        step = (norm - power) * inverse_slope
        threshold = threshold + step
        if float(step.amax()) <= tolerance * power:
            break
    return threshold


def _norm_and_inverse_slope(excess: Tensor, counts: Tensor | None, power: float) -> tuple[Tensor, Tensor]:
    """The norm N = (Σ c r^k)^{1/k} along rows, and -1/N' = N^{k-1} / Σ c r^{k-1};
    zero for a row whose keys all count zero.
    """
    tiny = torch.finfo(excess.dtype).tiny
    if counts is None and power == 2:
        norm = torch.linalg.vector_norm(excess, dim=-1, keepdim=True)
        return norm, norm / excess.sum(-1, keepdim=True).clamp_min(tiny)
    if counts is None and power == 1:
        norm = excess.sum(-1, keepdim=True)
        return norm, 1 / excess.sign_().sum(-1, keepdim=True).clamp_min(1)
    top = excess.amax(-1, keepdim=True).clamp_min(tiny)
    share = excess / top  # in [0, 1]: no power of it overflows
    lower = torch.where(share > 0, _raise_to(share, power - 1), torch.zeros_like(share))
    lower = lower if counts is None else lower * counts
    mass = (lower * share).sum(-1, keepdim=True)
    return top * mass ** (1 / power), mass ** ((power - 1) / power) / lower.sum(-1, keepdim=True).clamp_min(
        tiny
    )


def _bisection(scores: Tensor, counts: Tensor | None, low: Tensor, power: float, buffer: Tensor) -> Tensor:
    """For α > 2 the root is not convex in τ; halve the bracket to rounding instead."""
    high = scores.amax(-1, keepdim=True)
    for _ in range(HALVINGS + round(-math.log2(torch.finfo(scores.dtype).eps))):
        middle = 0.5 * (low + high)
        mass = _raise_to(torch.sub(scores, middle, out=buffer).clamp_(min=0) / power, power)
        mass = (mass if counts is None else mass * counts).sum(-1, keepdim=True)
        low, high = torch.where(mass >= 1, middle, low), torch.where(mass >= 1, high, middle)
    return low


def _raise_to(base: Tensor, power: float) -> Tensor:
    return base if power == 1 else base.square() if power == 2 else base**power
