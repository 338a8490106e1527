"""mercer: attention's kernel as a sum of features, by its eigenfunctions or its singular functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._kinds import names_wrong_kinds
from regard.attention import Attention, as_measure
from regard.certificate import Certificate
from regard.errors import ArgumentError, RefusalError
from regard.measure import Measure
from regard.normalizers import Softmax
from regard.potentials import Potential
from regard.potentials.base import Scaled
from regard.proofs import kernel_error

ALIKE = 1e-12
"""Scores that differ by less than this, relative to the largest, are symmetric."""
ROUNDED = 1e-9
"""More than float64 changes in a kernel whose scores are right to ten digits."""


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum:
    """exp s(x, y) = e^log_scale Σ_i values_i left_i(x) right_i(y) at the points, values falling.

    values (..., r); left (..., m, r) and right (..., n, r) are orthonormal in L² of the queries and of the
    context. symmetric: scores are, and left = ± right are eigenfunctions; positive: no eigenvalue is
    negative, so it is a Mercer kernel. logs (..., m, n): s - log_scale, at most zero.

    Examples:
        >>> x = torch.randn(8, 2, dtype=torch.float64)
        >>> found = regard.mercer(regard.Attention(regard.Dot()), x)
        >>> found.symmetric, found.positive, bool((found.values.diff() <= 0).all())
        (True, True, True)
    """

    values: Tensor
    left: Tensor
    right: Tensor
    log_scale: Tensor
    logs: Tensor
    symmetric: bool
    positive: bool

    def effective_dimension(self, regularization: float) -> Tensor:
        """Σ_i λ_i/(λ_i + ρ λ_1): how many features matter beside a noise of so many parts of the largest."""
        _check.positive("regularization", regularization)
        return (self.values / (self.values + regularization * self.values[..., :1])).sum(-1)

    def errors(self) -> Tensor:
        """(..., r + 1): the error of the best kernel of 0, 1, …, r features, in L² and relative to the
        kernel: √Σ_{i>k} λ_i² / √Σ λ_i².
        """
        tails = self.values.square().flip(-1).cumsum(-1).flip(-1)
        none = torch.zeros_like(tails[..., :1])
        return (torch.cat([tails, none], -1) / tails[..., :1]).sqrt()

    def count(self, error: float) -> Tensor:
        """The fewest features whose kernel is within `error`; no other kernel of so few is nearer."""
        if not 0 < error < 1:
            raise ArgumentError("error", f"is {error}", "give a relative error between 0 and 1")
        return (self.errors() > error).sum(-1)

    def kernel(self, count: int) -> Tensor:
        """Σ_{i≤count} λ_i left_i right_i, (..., m, n), without the factor e^log_scale."""
        values = self.values[..., :count].unsqueeze(-2)
        return (self.left[..., :count] * values) @ self.right[..., :count].mT

    def relative_error(self, count: int) -> Tensor:
        """The largest |Ĝ/G - 1| over all pairs, of the kernel of so many features: (...)."""
        return (self.kernel(count) * (-self.logs).exp() - 1).abs().flatten(-2).amax(-1)

    def output_error(self, count: int, radius: float) -> Certificate:
        """How far outputs of the kernel of so many features are from attention, for values in a ball, from
        the largest relative error over pairs, which must be below one.
        """
        worst = float(self.relative_error(count).max()) * (1 + ROUNDED) + ROUNDED
        if worst >= 1:
            found = f"{count} features are off by {worst:.3g} times the kernel at some pair; take more."
            raise RefusalError("output_error", [found])
        return kernel_error(worst, radius)

    def __repr__(self) -> str:
        kind = "Mercer kernel" if self.positive else "symmetric" if self.symmetric else "singular functions"
        shown = f"{float(self.count(0.01).max())}"[:-2]
        return f"Spectrum({kind}, {self.values.shape[-1]} values, {shown} features to 1 %)"


@names_wrong_kinds
def mercer(attention: Attention, x: Measure | Tensor, context: Measure | Tensor | None = None) -> Spectrum:
    """The spectrum of exp s between the tokens and their context, in L² of both laws: eigenvalues where
    scores are symmetric, singular values of the relation otherwise. All pairs are computed, in float64.

    Examples:
        >>> x = torch.randn(20, 2, dtype=torch.float64)
        >>> spectrum = regard.mercer(regard.Attention(regard.Gaussian()), x)
        >>> bool((spectrum.values[:-1] >= spectrum.values[1:]).all())
        True
    """
    if not isinstance(attention.normalizer, Softmax):
        name = type(attention.normalizer).__name__
        raise ArgumentError(
            "attention", f"has the normalizer {name}", "the kernel exp s belongs to Softmax()"
        )
    queries = as_measure("x", x)
    keys = queries if context is None else as_measure("context", context)
    scores = _potential(attention).scores(
        queries.points.double(), keys.points.double(), queries.positions(), keys.positions()
    )
    if not attention.support.allows(queries.positions(), keys.positions()).all():
        raise ArgumentError(
            "attention", f"has the support {attention.support!r}", "masks have no spectrum here"
        )
    return _spectrum(scores.detach(), queries, keys, alike=context is None)


def _potential(attention: Attention) -> Potential:
    temperature = attention.normalizer.temperature  # type: ignore[attr-defined]
    plain = not isinstance(temperature, Tensor) and temperature == 1.0
    return attention.potential if plain else Scaled(attention.potential, 1 / temperature)


def _spectrum(scores: Tensor, queries: Measure, keys: Measure, alike: bool) -> Spectrum:
    top = scores.flatten(-2).amax(-1)
    roots = [(0.5 * measure.log_masses().double()).exp() for measure in (queries, keys)]
    logs = scores - top[..., None, None]
    kernel = logs.exp() * roots[0].unsqueeze(-1) * roots[1].unsqueeze(-2)
    apart = float((scores - scores.mT).abs().max()) if alike else math.inf
    if apart > ALIKE * (1 + float(scores.abs().max())):
        left, values, right = torch.linalg.svd(kernel, full_matrices=False)
        return Spectrum(values, _over(left, roots[0]), _over(right.mT, roots[1]), top, logs, False, False)
    found, vectors = torch.linalg.eigh(0.5 * (kernel + kernel.mT))
    order = found.abs().argsort(-1, descending=True)
    found = found.gather(-1, order)
    vectors = vectors.gather(-1, order.unsqueeze(-2).expand_as(vectors))
    functions = _over(vectors, roots[0])
    positive = bool((found >= -1e-12 * found.abs().amax(-1, keepdim=True)).all())
    return Spectrum(found.abs(), functions, functions * found.sign().unsqueeze(-2), top, logs, True, positive)


def _over(vectors: Tensor, roots: Tensor) -> Tensor:
    """Functions at the points; zero where there is no mass."""
    return torch.where(roots > 0, 1 / roots.clamp_min(1e-300), 0.0).unsqueeze(-1) * vectors
