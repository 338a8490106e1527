"""Moves Σ_k E_k (b_k·u)² over |u| ≤ 1: by the Gram matrix [(b_k·b_l)²] of their forms (M3), (M4)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import UNIT, Lower, Upper, relative_error, sizes
from regard.proofs.ball_model.ellipsoids import SMALLEST, Diagonal, Sum, lifted, no_diagonal, no_shape
from regard.proofs.ball_model.quadratic import Grams, Own, Quadratic, own_square, split
from regard.proofs.ball_model.state import State

FINE = 24_000_000
"""Pairs of neurons, over all tokens, whose Gram matrices are made; the tokens that move least go without."""
MANY = 768
"""More neurons do without the largest eigenvalue of their cubes."""
LITTLE = (0.005, 0.02)
"""Tokens whose moves are bounded without pairs by less than this part of all remainders go without, too: of
few neurons, and of many.
"""
BLOCKS, SMALL = 6, 256
"""Into how many blocks the neurons of one token are cut, where there are more than so many."""


class Squares:
    """Moves Σ_k f_k (b_k·u)² m_k for slopes b (n, m, d0) and factors f (n, m), exact as they are, along the
    columns m_k of mixing (e, m). far: about how long other remainders are, of all tokens together.
    """

    def __init__(self, along: Tensor, factors: Tensor, mixing: Tensor, far: float) -> None:
        self.along, self.factors, self.mixing, self.far = along, factors, mixing, far

    def weights(self, i: int) -> Tensor:
        """E_ck = m_ck f_k of one token, (e, m), rounded once."""
        return self.mixing * self.factors[i]

    @cached_property
    def sizes_of_weights(self) -> Upper:
        """At least |E|_F, for each token."""
        return (computed_lengths(self.mixing.mT) * sizes(self.factors)).norm()

    @cached_property
    def own(self) -> Own:
        """bᵀb of each token, or bbᵀ if that is smaller: only their norms matter, which are the same."""
        m, width = self.along.shape[1:]
        return own_square(self.along if width <= m else self.along.mT)

    @cached_property
    def chosen(self) -> Tensor:
        """The tokens for which pairs of neurons are looked at: where the moves would be long without."""
        neurons = self.along.shape[1]
        length = self.without_pairs(no_diagonal(len(self.along), self.mixing)).weight
        most = max(1, FINE // max(1, neurons * neurons))
        longest = length.argsort(descending=True)[:most]
        return longest[length[longest] > LITTLE[neurons > MANY] * self.far].sort().values

    def without_pairs(self, parts: Diagonal, tokens: Tensor | None = None) -> Diagonal:
        """With the moves of some tokens (n,): y_k = (b_k·u)² is at most |b_k|², and Σ y_k ≤ |b|², so that
        f_k y_k = f_k |b_k| w_k with |w|² = Σ_k y_k²/|b_k|² ≤ |b|².
        """
        factors = sizes(self.factors) * self.lengths
        return parts.gram(factors if tokens is None else factors.where(tokens.unsqueeze(-1)), self.norm)

    def coarse(self, parts: Diagonal) -> Diagonal:
        """With the moves of tokens that are not chosen."""
        others = torch.ones(len(self.along), dtype=torch.bool).index_fill(0, self.chosen, False)
        return self.without_pairs(parts, others) if bool(others.any()) else parts

    @cached_property
    def lengths(self) -> Upper:
        """At least |b_k|, (n, m)."""
        return computed_lengths(self.along)

    @property
    def norm(self) -> Upper:
        """At least |b|, the largest (Σ_k (b_k·u)²)^{1/2}, for each token."""
        return self.own.norm.sqrt()

    @cached_property
    def fourth(self) -> Upper:
        """At least Σ_k |b_k|⁴."""
        return self.lengths.square().square().sum()

    @cached_property
    def pairs(self) -> dict[int, Pairs]:
        """(b_k·b_l)² for the chosen tokens."""
        products = {i: pairs_of(self.along[i], self.along[i].mT) for i in self.chosen.tolist()}
        return {i: found.map(torch.square_) for i, found in products.items()}

    @cached_property
    def quartic(self) -> Upper:
        """At least Σ_k (b_k·u)⁴: λ_max of `pairs`, or max|b_k|² |b|²."""
        value = (self.lengths.square().amax(-1) * self.norm.square()).bound.clone()
        off = relative_error(4 * self.along.shape[-1] + 16) * self.fourth
        for i, pairs in self.pairs.items():
            value[i] = min(float(value[i]), float(pairs.largest() + off[i]))
        return Upper(value)

    @cached_property
    def sixth(self) -> Upper:
        """At least Σ_k (b_k·u)⁶: λ_max of [|b_k·b_l|³], or max|b_k|² times `quartic`."""
        squares = self.lengths.square()
        value = (squares.amax(-1) * self.quartic).bound.clone()
        off = relative_error(6 * self.along.shape[-1] + 24) * (squares * squares.square()).sum()
        for i, pairs in self.pairs.items() if self.along.shape[1] <= MANY else ():
            cubes = pairs.map(lambda panel: panel * panel.sqrt())
            value[i] = min(float(value[i]), float(cubes.largest() + off[i]))
        return Upper(value)

    def crossed(self, i: int, w: Tensor, around: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """The shape (e, e) of Σ_k E_ck [2(b_k·u)(w_k·ε) + (w_k·ε)²] over some neurons of token i, and which:
        the `most` that may move it most. For w (d, m), and ε in the ellipsoid of Q = `around` (d, d).

        As forms of u and ε over unit balls they have the Gram matrices E[4(b_k·b_l)(w_kᵀQw_l)]Eᵀ and
        E[(w_kᵀQw_l)²]Eᵀ, which are added by (M1).
        """
        weights, lengths = self.weights(i), self.lengths[i]
        size = computed_lengths(around.flatten()).sqrt() * computed_lengths(w.mT)
        moves = torch.linalg.vector_norm(weights, dim=0) * size.value * (2 * lengths.value + size.value)
        kept = moves.argsort(descending=True)[:most].sort().values
        lengths, size, weights, w = lengths[kept], size[kept], weights[:, kept], w[:, kept]
        first, second = (lengths * size).square().sum(), size.square().square().sum()
        s, t = max(2 * float(first.sqrt()), SMALLEST), max(float(second.sqrt()), SMALLEST)
        f, g = 4 * (s + t) / s * (1 + 16 * UNIT), (s + t) / t * (1 + 16 * UNIT)
        along = self.along[i, kept]
        own, rests = pairs_of(along, along.mT), pairs_of(w.mT, around @ w)
        crossed = rests.joined(own, lambda rest, own: rest * (f * own + g * rest))
        unit = relative_error(4 * (len(kept) + len(w) + along.shape[-1]) + 96)
        error = unit * computed_lengths(weights.flatten()).square() * (Upper(f) * first + Upper(g) * second)
        return lifted(crossed.mixed(weights).unsqueeze(0), error.unsqueeze(0))[0], kept

    def into(self, after: State, rest: Sum) -> State:
        """The state with the moves of chosen tokens, or in H those of all."""
        rest.ball(relative_error(4) * self.sizes_of_weights * self.quartic.sqrt())
        if after.curved is not None:
            return self._curved(after, rest)
        if not len(self.chosen):
            return after.with_rest(rest)
        offset, around = split(self.grams, self.own.of(self.chosen))
        return with_quadratic(after, self.chosen, offset, around, rest)

    @property
    def grams(self) -> Grams:
        """Of H_c = Σ_k E_ck b_k b_kᵀ with M = Σ_l b_l b_lᵀ for the chosen tokens: ⟨H_c, M⟩ = Σ_kl E_ck
        (b_k·b_l)² are sums of rows.
        """
        gram, inner = [], []
        for i in self.chosen.tolist():
            weights, pairs = self.weights(i), self.pairs[i]
            gram.append(pairs.mixed(weights))
            inner.append(weights @ pairs.times(torch.ones_like(self.factors[i])))
        size, fourth = self.sizes_of_weights[self.chosen], self.fourth[self.chosen]
        unit = relative_error(4 * self.along.shape[1] + 4 * self.along.shape[2] + 64)
        whole = self.lengths.square().sum()[self.chosen]
        return Grams(
            torch.stack(gram),
            unit * size.square() * fourth,
            torch.stack(inner),
            unit * size * fourth.sqrt() * whole,
        )

    def _curved(self, after: State, rest: Sum) -> State:
        """H gains Σ_k E_ck b_k b_kᵀ."""
        width = self.along.shape[-1]
        forms = [
            self.weights(i) @ (b.unsqueeze(-1) * b.unsqueeze(-2)).flatten(1) for i, b in enumerate(self.along)
        ]
        gained = Quadratic(torch.stack(forms).unflatten(-1, (width, width)))
        lost = relative_error(self.along.shape[1] + 8) * self.sizes_of_weights * self.fourth.sqrt()
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
    shape = around if len(chosen) == n else no_shape(n, width).index_copy_(0, chosen, around)
    center = after.center + moved
    rest.segments(moved.unsqueeze(-1)).shape(shape)
    rest.ball(relative_error(2) * (computed_lengths(center) + computed_lengths(moved)))
    return replace(after, center=center).with_rest(rest)


@dataclass(frozen=True)
class Pairs:
    """A symmetric matrix K by panels: blocks of columns from the diagonal on downwards."""

    bounds: tuple[int, ...]
    panels: tuple[Tensor, ...]

    def __iter__(self) -> Iterator[tuple[int, int, Tensor]]:
        return (
            (a, b, panel) for (a, b), panel in zip(itertools.pairwise(self.bounds), self.panels, strict=True)
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Pairs:
        """A function of all entries."""
        return Pairs(self.bounds, tuple(change(panel) for panel in self.panels))

    def joined(self, other: Pairs, change: Callable[[Tensor, Tensor], Tensor]) -> Pairs:
        """A function of all entries of two."""
        panels = zip(self.panels, other.panels, strict=True)
        return Pairs(self.bounds, tuple(change(*both) for both in panels))

    def times(self, z: Tensor) -> Tensor:
        """Kz."""
        found = torch.zeros_like(z)
        for a, b, panel in self:
            found[a:] = found[a:] + panel @ z[a:b]
            found[a:b] = found[a:b] + panel[b - a :].mT @ z[b:]
        return found

    def mixed(self, weights: Tensor) -> Tensor:
        """E K Eᵀ for E (e, m): half of it, and its transpose."""
        half = weights.new_zeros(len(weights), len(weights))
        for a, b, panel in self:
            below = weights[:, b:] @ panel[b - a :] + (0.5 * weights[:, a:b]) @ panel[: b - a]
            half = half + below @ weights[:, a:b].mT
        return half + half.mT

    def largest(self) -> Upper:
        """At least λ_max of K, whose entries are not negative: max (Kz)_k/z_k for any z > 0 (Collatz and
        Wielandt).
        """
        z = self.times(torch.ones(self.bounds[-1], dtype=torch.float64)).clamp_min(1e-300)
        for _ in range(2):
            z = self.times(z)
            z = z / z.amax().clamp_min(1e-300) + 1e-9
        return (Upper(self.times(z), len(z) + 1) / Lower(z)).amax()


def pairs_of(rows: Tensor, columns: Tensor) -> Pairs:
    """The products of rows (m, d) with columns (d, m) where they are symmetric, in a few blocks: half of
    them.
    """
    m = len(rows)
    bounds = tuple(sorted({round(k * m / BLOCKS) for k in range(BLOCKS + 1)})) if m > SMALL else (0, m)
    return Pairs(bounds, tuple(rows[a:] @ columns[:, a:b] for a, b in itertools.pairwise(bounds)))
