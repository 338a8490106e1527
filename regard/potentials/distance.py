"""Potentials of the distance |q - k|: Gaussian (L2, metric, Mahalanobis), Laplace,
Student-t (polynomial decay).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard import _check
from regard._transforms import forward_rule
from regard._types import Features, Scalar, over_scores
from regard.parameters import Tokens, number, parameter, projection
from regard.potentials.base import Potential, project_both, project_differences


class DistancePotential(Potential):
    """A potential of q - k, with q and k the projected points.

    Abstract: it only says how points are projected.
    """

    positional: ClassVar[bool] = False
    w_q: Tensor | None
    w_k: Tensor | None
    b_q: Tensor | None
    b_k: Tensor | None

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        return project_differences(x, y, self.w_q, self.w_k, self.b_q, self.b_k)

    def projections(
        self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor
    ) -> tuple[Features, Features]:
        return project_both(x, y, self.w_q, self.w_k, self.b_q, self.b_k)


@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(DistancePotential):
    """a(x, y) = -|w_qᵀx - w_kᵀy|² / (2 bandwidth²): L2 attention (kim2021), metric attention (metric2024).

    bandwidth None is c^{1/4} for queries of width c, so that scores are divided by √c, as those of Dot are.
    A Mahalanobis distance (x-y)ᵀ M (x-y) is w_q = w_k = L with M = L Lᵀ.

    Examples:
        >>> q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
        >>> out = regard.attend(q, k, v, potential=regard.Gaussian(bandwidth=2.0))
        >>> by_hand = (-torch.cdist(q, k).square() / 8).softmax(-1) @ v
        >>> torch.allclose(out, by_hand, atol=1e-5)
        True
    """

    w_q: Tensor | None = projection(Tokens.QUERIES, default=None)
    w_k: Tensor | None = projection(Tokens.KEYS, default=None)
    bandwidth: Scalar | None = number(default=None)
    b_q: Tensor | None = parameter(rank=1, default=None)
    b_k: Tensor | None = parameter(rank=1, default=None)

    def __post_init__(self) -> None:
        _check.projections(self.w_q, self.w_k, self.b_q, self.b_k, "bandwidth")
        if self.bandwidth is not None:
            _check.squared("bandwidth", self.bandwidth)

    def bandwidth_at(self, width: int) -> Scalar:
        """Return the bandwidth for queries of this width: c^{1/4} where none is given."""
        return math.sqrt(math.sqrt(max(width, 1))) if self.bandwidth is None else self.bandwidth

    def pair(self, queries: Features, keys: Features) -> Tensor:
        bandwidth = over_scores(self.bandwidth_at(queries.shape[-1]))
        return -0.5 * squared_distances(queries, keys) / bandwidth**2


@dataclass(frozen=True, eq=False, repr=False)
class Laplace(DistancePotential):
    """a(x, y) = -|q - k| / bandwidth.

    Examples:
        >>> regard.Laplace(bandwidth=2.0).scores(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])).tolist()
        [[-2.5]]
    """

    w_q: Tensor | None = projection(Tokens.QUERIES, default=None)
    w_k: Tensor | None = projection(Tokens.KEYS, default=None)
    bandwidth: Scalar = number(default=1.0)
    b_q: Tensor | None = parameter(rank=1, default=None)
    b_k: Tensor | None = parameter(rank=1, default=None)

    def __post_init__(self) -> None:
        _check.projections(self.w_q, self.w_k, self.b_q, self.b_k, "bandwidth")
        _check.positive("bandwidth", self.bandwidth)

    def pair(self, queries: Features, keys: Features) -> Tensor:
        return -distances(queries, keys) / over_scores(self.bandwidth)


@dataclass(frozen=True, eq=False, repr=False)
class StudentT(DistancePotential):
    """a(x, y) = -(nu + 1)/2 · log(1 + |q - k|² / (nu bandwidth²)): polynomial decay.

    Examples:
        >>> bool(regard.StudentT().scores(torch.zeros(1, 2), torch.ones(1, 2)) < 0)
        True
    """

    w_q: Tensor | None = projection(Tokens.QUERIES, default=None)
    w_k: Tensor | None = projection(Tokens.KEYS, default=None)
    bandwidth: Scalar = number(default=1.0)
    nu: Scalar = number(default=1.0)
    b_q: Tensor | None = parameter(rank=1, default=None)
    b_k: Tensor | None = parameter(rank=1, default=None)

    def __post_init__(self) -> None:
        _check.projections(self.w_q, self.w_k, self.b_q, self.b_k, "bandwidth")
        _check.positive("nu", self.nu)
        _check.squared("bandwidth", self.bandwidth)

    def pair(self, queries: Features, keys: Features) -> Tensor:
        nu = over_scores(self.nu)
        ratio = squared_distances(queries, keys) / (nu * over_scores(self.bandwidth) ** 2)
        return -0.5 * (nu + 1) * torch.log1p(ratio)


class _TracedDistances(torch.autograd.Function):
    """|q_i - k_j| by direct differences, with derivatives that are zero where the distance is zero (a
    subgradient).

    torch.compile cannot trace functions that have forward mode or vmap rules; it traces this one.
    """

    @staticmethod
    def forward(queries: Tensor, keys: Tensor) -> Tensor:
        if queries.dtype == torch.float64:
            return torch.cdist(queries, keys, compute_mode="donot_use_mm_for_euclid_dist")
        return _by_products(queries.double(), keys.double()).sqrt().to(queries.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys, distance = ctx.saved_tensors
        return _pull(queries, keys, _over(gradient, distance))


class _Distances(_TracedDistances):
    """The same with forward mode and vmap."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, by_q: Tensor | None, by_k: Tensor | None) -> Tensor:
        with forward_rule(ctx) as (queries, keys, distance):
            return _over(_push(queries, keys, by_q, by_k), distance)


class _TracedSquaredDistances(torch.autograd.Function):
    """|q_i - k_j|² by direct differences; a polynomial,
    so that its derivatives of any order are right at zero too.
    """

    @staticmethod
    def forward(queries: Tensor, keys: Tensor) -> Tensor:
        if queries.dtype == torch.float64:
            return torch.cdist(queries, keys, compute_mode="donot_use_mm_for_euclid_dist").square()
        return _by_products(queries.double(), keys.double()).to(queries.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys = ctx.saved_tensors
        return _pull(queries, keys, 2 * gradient)


class _SquaredDistances(_TracedSquaredDistances):
    """The same with forward mode and vmap."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, by_q: Tensor | None, by_k: Tensor | None) -> Tensor:
        with forward_rule(ctx) as (queries, keys):
            return 2 * _push(queries, keys, by_q, by_k)


def _over(change: Tensor, distance: Tensor) -> Tensor:
    """change / distance, zero where the distance is zero."""
    apart = distance > 0
    return torch.where(
        apart, change / torch.where(apart, distance, torch.ones_like(distance)), torch.zeros_like(change)
    )


def _pull(queries: Tensor, keys: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_j pull_ij (q_i - k_j) and Σ_i pull_ij (k_j - q_i), as matrix products of centered points."""
    if 0 in keys.shape:
        return torch.zeros_like(queries), torch.zeros_like(keys)
    center = keys.detach().mean(-2, keepdim=True)  # a common shift changes nothing but rounding: take it out
    queries, keys = queries - center, keys - center
    return queries * pull.sum(-1, keepdim=True) - pull @ keys, keys * pull.sum(-2).unsqueeze(
        -1
    ) - pull.mT @ queries


def _push(queries: Tensor, keys: Tensor, by_q: Tensor | None, by_k: Tensor | None) -> Tensor:
    """(q_i - k_j)·(q'_i - k'_j), as matrix products of centered points."""
    center = keys.detach().mean(-2, keepdim=True) if keys.shape[-2] else keys.new_zeros(keys.shape[-1])
    queries, keys = queries - center, keys - center
    change: Tensor | float = 0.0
    if by_q is not None:
        change = change + ((queries * by_q).sum(-1, keepdim=True) - by_q @ keys.mT)
    if by_k is not None:
        change = change + ((keys * by_k).sum(-1, keepdim=True).mT - queries @ by_k.mT)
    assert isinstance(change, Tensor)
    return change


def _by_products(queries: Tensor, keys: Tensor) -> Tensor:
    """|q|² + |k|² - 2 q·k in float64, for inputs of lower precision: all their digits,
    at the speed of a matrix product.
    """
    center = keys.mean(-2, keepdim=True) if keys.shape[-2] else keys.new_zeros(keys.shape[-1])
    queries, keys = queries - center, keys - center
    shrink = (
        1 - 8 * torch.finfo(torch.float64).eps
    )  # what rounding leaves of a distance that is zero falls below zero, and is cut
    lengths_q, lengths_k = (shrink * z.square().sum(-1, keepdim=True) for z in (queries, keys))
    left = torch.cat([-2 * queries, lengths_q, torch.ones_like(lengths_q)], -1)
    right = torch.cat([keys, torch.ones_like(lengths_k), lengths_k], -1)
    return (left @ right.mT).clamp(min=0)


def distances(queries: Tensor, keys: Tensor) -> Tensor:
    """Euclidean distances (..., m, n) between rows, by direct differences:
    exact near zero and far from the origin.
    """
    function = _TracedDistances if torch.compiler.is_compiling() else _Distances
    return function.apply(*_together(queries, keys))


def squared_distances(queries: Tensor, keys: Tensor) -> Tensor:
    """Squared Euclidean distances (..., m, n) between rows."""
    function = _TracedSquaredDistances if torch.compiler.is_compiling() else _SquaredDistances
    return function.apply(*_together(queries, keys))


def _together(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Both with one batch shape."""
    batch = torch.broadcast_shapes(queries.shape[:-2], keys.shape[:-2])
    return queries.expand(*batch, -1, -1), keys.expand(*batch, -1, -1)
