"""Moves Σ_k E_k (b_k·u)² over |u| ≤ 1: by the Gram matrix [(b_k·b_l)²] of their forms (M3), (M4)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Lower, Upper, relative_error
from regard.proofs.ball_model.ellipsoids import Sum
from regard.proofs.ball_model.quadratic import Grams, Own, Quadratic, form_norms, split
from regard.proofs.ball_model.state import State

FINE = 24_000_000
"""Pairs of neurons, over all tokens, whose Gram matrices are made; the tokens that move least go without."""


class Squares:
    """(b_k·u)² for slopes b (n, m, d0), exact as they are; `own`: AᵀA of each token."""

    def __init__(self, along: Tensor, own: Own) -> None:
        self.along, self.own = along, own
        tokens, neurons = along.shape[:2]
        self.fine = max(1, min(tokens, FINE // max(1, neurons * neurons)))

    @cached_property
    def lengths(self) -> Upper:
        """At least |b_k|, (n, m)."""
        return computed_lengths(self.along)

    @cached_property
    def norm(self) -> Upper:
        """At least (Σ_k (b_k·u)²)^{1/2}, for each token."""
        return form_norms(self.along)

    @cached_property
    def fourth(self) -> Upper:
        """At least Σ_k |b_k|⁴."""
        return self.lengths.square().square().sum()

    @cached_property
    def chosen(self) -> Tensor:
        """The tokens that move most: for these pairs of neurons are looked at."""
        return self.norm.value.argsort(descending=True)[: self.fine]

    @cached_property
    def pairs(self) -> dict[int, Tensor]:
        """(b_k·b_l)² for the chosen tokens."""
        return {int(i): (self.along[i] @ self.along[i].mT).square() for i in self.chosen}

    @cached_property
    def quartic(self) -> Upper:
        """At least Σ_k (b_k·u)⁴: λ_max of `pairs`, or max|b_k|² |b|²."""
        value = (self.lengths.square().amax(-1) * self.norm.square()).bound.clone()
        off = relative_error(4 * self.along.shape[-1] + 16) * self.fourth
        for i, pairs in self.pairs.items():
            value[i] = min(float(value[i]), float(largest_row(pairs) + off[i]))
        return Upper(value)

    def into(self, after: State, weights: Tensor, rest: Sum) -> State:
        """The state with Σ_k E_ck (b_k·u)² for weights (n, e, m), in H or as a move of its own."""
        rest.ball(relative_error(4) * computed_lengths(weights.flatten(1)) * self.quartic.sqrt())
        if after.curved is not None:
            return self._curved(after, weights, rest)
        if not self.along.shape[-1]:
            return after.with_rest(rest)
        coarse = torch.ones(after.tokens, dtype=torch.bool).index_fill(0, self.chosen, False)
        rest.gram(weights, self.quartic.sqrt().where(coarse))
        offset, around = split(self.grams(weights), self.own.of(self.chosen))
        return with_quadratic(after, self.chosen, offset, around, rest)

    def grams(self, weights: Tensor) -> Grams:
        """Of H_c = Σ_k E_ck b_k b_kᵀ for the chosen tokens."""
        mixed, along, square = weights[self.chosen], self.along[self.chosen], self.own.square[self.chosen]
        gram = torch.stack([mixed[k] @ self.pairs[int(i)] @ mixed[k].mT for k, i in enumerate(self.chosen)])
        inner = (mixed @ ((along @ square) * along).sum(-1, keepdim=True)).squeeze(-1)
        size, fourth = computed_lengths(mixed.flatten(1)), self.fourth[self.chosen]
        unit = relative_error(4 * mixed.shape[-1] + 4 * along.shape[-1] + 64)
        whole = computed_lengths(square.flatten(1))
        return Grams(gram, unit * size.square() * fourth, inner, unit * size * fourth.sqrt() * whole)

    def _curved(self, after: State, weights: Tensor, rest: Sum) -> State:
        """H gains Σ_k E_ck b_k b_kᵀ."""
        width = self.along.shape[-1]
        squares = (self.along.unsqueeze(-1) * self.along.unsqueeze(-2)).flatten(2)
        gained = Quadratic((weights @ squares).unflatten(-1, (width, width)))
        unit = relative_error(weights.shape[-1] + 8)
        lost = unit * computed_lengths(weights.flatten(1)) * self.fourth.sqrt()
        return with_forms(after, gained, rest.ball(lost))


def with_forms(after: State, gained: Quadratic, rest: Sum) -> State:
    """The state with more in H; what rounding of the sum hides is in the rest."""
    assert after.curved is not None
    curved = after.curved.plus(gained)
    return replace(after, curved=curved).with_rest(rest.ball(relative_error(2) * curved.size))


def with_quadratic(after: State, chosen: Tensor, offset: Tensor, around: Tensor, rest: Sum) -> State:
    """A quadratic move of some tokens: half of its one-sided part is a move of the center."""
    n, width = after.center.shape
    moved = torch.zeros(n, width, dtype=torch.float64).index_copy(0, chosen, 0.5 * offset)
    shape = torch.zeros(n, width, width, dtype=torch.float64).index_copy(0, chosen, around)
    center = after.center + moved
    rest.segments(moved.unsqueeze(-1)).shape(shape)
    rest.ball(relative_error(2) * (computed_lengths(center) + computed_lengths(moved)))
    return replace(after, center=center).with_rest(rest)


def largest_row(pairs: Tensor) -> Upper:
    """At least λ_max of a symmetric matrix with entries that are not negative: max (Kz)_k/z_k for any z > 0
    (Collatz and Wielandt).
    """
    z = pairs.sum(-1).clamp_min(1e-300)
    for _ in range(3):
        z = pairs @ z
        z = z / z.amax().clamp_min(1e-300) + 1e-9
    return (Upper(pairs @ z, len(z) + 1) / Lower(z)).amax()
