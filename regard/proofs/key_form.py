"""Scores as functions of a key: an affine part that depends on the query, and a bias that does not.

    S(x, y) = (Aᵀx + β)·y + bias(y), up to what is constant in a row

Bilinear scores have no bias; those of a Gaussian have -|k|²/2b².
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths, length
from regard._upper import Upper, exact, product, relative_error
from regard.domains import Domain
from regard.potentials import Dot, Gaussian, Potential
from regard.potentials.base import Scaled
from regard.proofs.scores import FACTOR, Form, bandwidth_of, bilinear
from regard.proofs.setting import equivariant
from regard.proofs.subject import Head
from regard.proofs.theorem import Refusal


@dataclass(frozen=True)
class KeyForm:
    """`form` is the affine part. The bias is -factor |wᵀy + b|²/2, none where there is no factor."""

    form: Form
    factor: float = 0.0
    w: Tensor | None = None
    b: Tensor | None = None

    @property
    def a(self) -> Tensor:
        return self.form.a

    @cached_property
    def multiple(self) -> float | None:
        """The number that A is times the identity; None where it is no multiple of it."""
        a = self.form.a
        square = a.shape[0] == a.shape[1]
        alike = square and bool((a == a[0, 0] * torch.eye(len(a), dtype=a.dtype)).all())
        return float(a[0, 0]) if alike else None

    def tilts(self, queries: Tensor) -> Tensor:
        """Aᵀx + β (m, d), rounded."""
        return queries @ self.form.a + self.form.beta

    def tilt_error(self, queries: Tensor) -> Upper:
        """How far computed tilts are from the true ones, in length."""
        form, longest = self.form, computed_lengths(queries).amax()
        size = computed_lengths(form.a.flatten()) * longest + computed_lengths(form.beta)
        return relative_error(queries.shape[-1] + 3) * size + form.error * longest + form.error_beta

    def bias(self, keys: Tensor) -> Tensor | None:
        """The bias of each key (n,), rounded."""
        if not self.factor:
            return None
        return -0.5 * self.factor * self._projected(keys).square().sum(-1)

    def bias_error(self, reach: Upper) -> Upper:
        """How far computed biases of keys that are no longer than `reach` are from the true ones."""
        if not self.factor:
            return exact(0.0)
        width, narrow = (1, 1) if self.w is None else self.w.shape
        return relative_error(4 * (width + narrow) + 4 * FACTOR) * self._bias_size(reach)

    def size(self, queries: Upper, keys: Upper) -> Upper:
        """At least what the terms of a score sum to, for queries and keys of at most these lengths."""
        form = self.form
        factors = form.factors or (form.a,)
        whole = product([computed_lengths(factor.flatten()) for factor in factors])
        found = whole * queries * keys + length(form.beta) * keys + length(form.gamma) * queries
        return found + 4 * (self._bias_size(keys) + self._bias_size(queries)) if self.factor else found

    def _bias_size(self, reach: Upper) -> Upper:
        widened = reach if self.w is None else length(self.w) * reach
        widened = widened if self.b is None else widened + length(self.b)
        return Upper(self.factor, FACTOR) * widened.square()

    def _projected(self, keys: Tensor) -> Tensor:
        projected = keys if self.w is None else keys @ self.w
        return projected if self.b is None else projected + self.b


def key_form(head: Head, width: int, domain: Domain) -> KeyForm:
    """The scores of one head as functions of a key of this width, or a refusal."""
    if not head.softmax:
        name = type(head.normalizer).__name__
        raise Refusal(f"rows of {name} are not Gibbs laws, so keys have no tangent atoms; use Softmax()")
    equivariant(head, domain, "compress what all queries see alike")
    form = head.form(width)
    if form is not None:
        return KeyForm(form)
    potential, factor = _unscaled(head.potential)
    if not isinstance(potential, Gaussian) or factor <= 0:
        name = type(potential).__name__
        raise Refusal(f"scores of {name} are not affine in the keys; use Dot, Bilinear or Gaussian")
    factor = factor / bandwidth_of(potential, width) ** 2
    same = Dot(potential.w_q, potential.w_k, factor, potential.b_q, potential.b_k)
    return KeyForm(bilinear.one(same, width), factor, _double(potential.w_k), _double(potential.b_k))


def _unscaled(potential: Potential) -> tuple[Potential, float]:
    factor = 1.0
    while isinstance(potential, Scaled):
        factor, potential = factor * float(potential.factor), potential.potential
    return potential, factor


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float64)
