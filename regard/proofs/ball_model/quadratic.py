"""Quadratic moves uᵀH_c u over |u| ≤ 1: by the Gram matrix of the H_c, with a positive part taken out (M3).

|uᵀ(Σ a_c H_c)u| ≤ |Σ a_c H_c|_F = (aᵀGa)^{1/2}, G_cd = ⟨H_c, H_d⟩. With M = AᵀA and H_c = κ_c M + H°_c, the
first part is κ times a number of [0, |M|], and the second has the Gram matrix G - κκᵀ|M|_F².
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import WIDE, computed_lengths, near_largest_roots, spectral_norms
from regard._upper import Upper, relative_error
from regard.proofs.ball_model.ellipsoids import lifted
from regard.proofs.ball_model.updates import Map, symmetric_products


def form_norms(matrices: Tensor) -> Upper:
    """At least the spectral norm of each matrix."""
    a, b = matrices.shape[-2:]
    if not b:
        return Upper(matrices.new_zeros(matrices.shape[:-2]))
    if min(a, b) < WIDE:
        return spectral_norms(matrices)
    rows = (matrices if a <= b else matrices.mT).reshape(-1, min(a, b), max(a, b))
    found = near_largest_roots(symmetric_products(rows, rows), max(a, b))
    return found.map(lambda value: value.reshape(matrices.shape[:-2]))


@dataclass(frozen=True)
class Own:
    """M = AᵀA of each token as computed (n, k, k), at least its norm, and at least how far it is off."""

    square: Tensor
    norm: Upper
    error: Upper

    def of(self, chosen: Tensor) -> Own:
        """Those of some tokens."""
        return Own(self.square[chosen], self.norm[chosen], self.error[chosen])

    def of_each(self) -> Own:
        """With a dimension of length one after the tokens, for several forms of each."""
        return Own(self.square.unsqueeze(1), self.norm.unsqueeze(-1), self.error.unsqueeze(-1))

    @property
    def weight(self) -> Tensor:
        """About |M|_F²: what κ is divided by."""
        return torch.linalg.vector_norm(self.square, dim=(-2, -1)).square().clamp_min(1e-280)


def own_square(linear: Tensor) -> Own:
    """That of A (n, d, k)."""
    error = relative_error(linear.shape[-2] + 4) * computed_lengths(linear.flatten(1)).square()
    square = symmetric_products(linear.mT, linear.mT)
    return Own(square, near_largest_roots(square, linear.shape[-2]).square(), error)


@dataclass(frozen=True)
class Grams:
    """G (n, c, c) and ⟨H_c, M⟩ (n, c), each with at least how far it may be off: G in norm, the others as
    a vector.
    """

    gram: Tensor
    gram_error: Upper
    inner: Tensor
    inner_error: Upper


def split(grams: Grams, own: Own) -> tuple[Tensor, Tensor]:
    """A vector of which a number in [0, 1] is a part of the move, and the shape of the rest.

    Any κ is sound: where ⟨H, M⟩ = κm + δ, the rest has the Gram matrix G - κκᵀm - κδᵀ - δκᵀ + κκᵀ(|M|² - m).
    """
    m, whole = own.weight, computed_lengths(own.square.flatten(-2))
    kappa = grams.inner / m.unsqueeze(-1)
    size = computed_lengths(kappa)
    rest = grams.gram - (kappa * m.unsqueeze(-1)).unsqueeze(-1) * kappa.unsqueeze(-2)
    trace = grams.gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0.0)
    forms = (Upper(trace, grams.gram.shape[-1]) + grams.gram_error * grams.gram.shape[-1]).sqrt()
    missed = relative_error(8) * size * Upper(m) + grams.inner_error + forms * own.error
    around = (
        own.error * (2 * whole + own.error) + relative_error(own.square.shape[-1] ** 2 + 4) * whole.square()
    )
    rounded = relative_error(8) * (computed_lengths(grams.gram.flatten(-2)) + size.square() * Upper(m, 1))
    error = grams.gram_error + size.square() * around + 2 * size * missed + rounded
    return kappa * own.norm.bound.unsqueeze(-1), lifted(rest, error)


def symmetric(forms: Tensor) -> Tensor:
    return 0.5 * (forms + forms.mT)


def quartic_norms(forms: Tensor) -> Upper:
    """At least the spectral norm of symmetric matrices (..., k, k): |XXᵀ|_F^{1/2}, or |X|_F."""
    whole = computed_lengths(forms.flatten(-2))
    fourth = (
        computed_lengths((forms @ forms.mT).flatten(-2))
        + relative_error(forms.shape[-1] + 2) * whole.square()
    )
    return fourth.sqrt().minimum(whole)


def reach_of_forms(forms: Tensor, own: Own) -> Upper:
    """At least |uᵀXu| for symmetric X (n, k, k), or several of each token (…, n, m, k, k): that of X, or of
    X - κM and κ|M|.
    """
    own = own.of_each() if forms.ndim > own.square.ndim else own
    kappa = (forms * own.square).sum((-2, -1)) / own.weight
    size = Upper(kappa.abs())
    rest = forms - kappa[..., None, None] * own.square
    parts = computed_lengths(forms.flatten(-2)) + size * computed_lengths(own.square.flatten(-2))
    apart = size * (own.norm + own.error) + quartic_norms(rest) + relative_error(8) * parts
    return quartic_norms(forms).minimum(apart)


@dataclass(frozen=True)
class Quadratic:
    """H (n, c, k, k), symmetric in its last dimensions."""

    forms: Tensor

    @cached_property
    def size(self) -> Upper:
        """At least |H_i|_F."""
        return computed_lengths(self.forms.flatten(1))

    def through(self, matrix: Map) -> Quadratic:
        return Quadratic((matrix @ self.forms.flatten(2)).unflatten(-1, self.forms.shape[2:]))

    def where(self, kept: Tensor) -> Quadratic:
        """Zero where the mask (n, 1, 1) is false."""
        return Quadratic(torch.where(kept.unsqueeze(-1), self.forms, 0.0))

    def plus(self, other: Quadratic) -> Quadratic:
        return Quadratic(self.forms + other.forms)

    def along(self, directions: Tensor) -> Tensor:
        """Σ_c a_c H_c for directions (n or 1, c, m), (n, m, k, k)."""
        return (directions.mT @ self.forms.flatten(2)).unflatten(-1, self.forms.shape[2:])

    def reach(self, directions: Tensor, own: Own) -> Upper:
        """At least |uᵀ(Σ a_c H_c)u|, (n, m)."""
        rounding = (
            relative_error(self.forms.shape[1] + 4)
            * self.size.unsqueeze(-1)
            * computed_lengths(directions.mT)
        )
        return reach_of_forms(self.along(directions), own) + rounding

    def grams(self, own: Own) -> Grams:
        """What `split` needs."""
        flat = self.forms.flatten(2)
        inner = (flat @ own.square.flatten(1).unsqueeze(-1)).squeeze(-1)
        unit = relative_error(flat.shape[-1] + 4)
        whole = computed_lengths(own.square.flatten(1))
        return Grams(flat @ flat.mT, unit * self.size.square(), inner, unit * self.size * whole)
