"""How the scores of heads move near a sequence, and the laws at its center (M7).

Heads of one shape are taken together: all tensors have a first dimension of heads then, which is not named
below, and none where there is one head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import ELEMENTARY, UNIT, Upper, exact, relative_error, sizes
from regard.proofs.ball_model.ellipsoids import trace_roots, widths
from regard.proofs.ball_model.functionals import Functionals
from regard.proofs.ball_model.joint import Joint
from regard.proofs.ball_model.quadratic import form_norms, reach_of_forms, symmetric
from regard.proofs.ball_model.sides import Side, product_norms
from regard.proofs.ball_model.state import State
from regard.proofs.theorem import Refusal

EXPLICIT = 4_000_000
"""Up to how many numbers quadratic forms are written out; beyond, head by head by (M8)."""


def is_written_out(rows: int, columns: int, width: int) -> bool:
    """Whether quadratic forms of this many coordinates have room as they are."""
    return rows * columns * width * width <= EXPLICIT


@dataclass(eq=False, frozen=True)
class ScoreMoves:
    """Scores of heads of one shape near a sequence.

    bias (n, n) of pairs, -inf for what is hidden. roundings: of both projections. by_query, by_key (n or 1,
    d, n): along which tokens move scores. by_groups (n, n, k): how scores move with the groups.
    """

    state: State
    bias: Tensor | None
    roundings: int
    query: Side
    key: Side
    by_query: Tensor
    by_key: Tensor
    by_groups: Tensor

    @property
    def first_width(self) -> int:
        """How many directions u has."""
        return self.state.linear.shape[-1]

    # At the center

    @cached_property
    def at_center(self) -> tuple[Tensor, Tensor]:
        """Scores with their fixed biases, and which are seen."""
        scores = self.query.value @ self.key.value.mT
        scores = scores if self.bias is None else scores + self.bias
        finite = torch.isfinite(scores)
        if bool((~finite & (scores != -math.inf)).any()):
            raise Refusal("scores leave the range of float64; scale the tokens")
        return scores, finite

    @cached_property
    def law(self) -> Tensor:
        return self.at_center[0].softmax(-1)

    @property
    def seen(self) -> Tensor:
        return self.at_center[1]

    @cached_property
    def score_error(self) -> Upper:
        """At least how far scores, and logarithms of the law, may be off anywhere in the neighborhood, for
        each row: rounding of projections, products, biases and exponentials.
        """
        unit = relative_error(self.state.width + self.roundings + 16)  # of projections, then of products
        query, key = self.query, self.key
        products_of = (
            unit * (query.whole * largest_token(key.length) + query.length * largest_token(key.whole))
            + (unit * query.whole) * largest_token(unit * key.whole)
            + relative_error(query.value.shape[-1] + 16) * query.length * largest_token(key.length)
        )
        largest = sizes(torch.where(self.seen, self.at_center[0], 0.0)).amax(-1)
        return (
            products_of
            + relative_error(96) * (largest + 1)
            + Upper((ELEMENTARY + self.state.tokens) * 2 * UNIT, 1)
        )

    # Moves

    @cached_property
    def slopes(self) -> Tensor:
        """How centered scores move with u and the groups, (n, n, k)."""
        query, key = self.query, self.key
        along = torch.einsum("...jc,...ick->...ijk", key.value, query.moves) + torch.einsum(
            "...ic,...jck->...ijk", query.value, key.moves
        )
        along = torch.cat([along, self.by_groups], -1)
        return along - self.law.unsqueeze(-2) @ along

    @cached_property
    def slope_sizes(self) -> Upper:
        """At least what slopes are made of, (n, n)."""
        query, key = self.query, self.key
        k, q = computed_lengths(key.value), computed_lengths(query.value)
        along = query.size.unsqueeze(-1) * k.unsqueeze(-2) + q.unsqueeze(-1) * key.size.unsqueeze(-2)
        return along + self._mean(along)

    def _mean(self, pairs: Upper) -> Upper:
        """Σ_j P_ij p_ij, (n, 1)."""
        return (Upper(self.law, self.state.tokens + 4) * pairs).sum(-1).unsqueeze(-1)

    def _centered(self, pairs: Upper) -> Upper:
        """At least |p_j - Σ P p| for numbers of at most these sizes: (1 - P_j) p_j and all others."""
        law = Upper(self.law, self.state.tokens + 4)
        others = (law * pairs).map(lambda value: torch.where(self.seen, value, 0.0))
        less = Upper((1 - self.law).clamp_min(0.0) + 8 * UNIT * self.state.tokens, 2)
        return less * pairs + others.sums_of_others()

    @cached_property
    def by_remainders(self) -> Upper:
        """At least how groups and ellipsoids of single tokens move centered scores, (n, n)."""
        groups = self.state.groups
        if isinstance(groups, Joint):
            found = self._joint_reach(groups)
        else:
            found = groups.lengths(self.slopes[..., self.first_width :])
        if groups.beside is not None:
            found = groups.with_beside(found, self._local(groups.beside))
        return found + self._local(self.state.shape) if self.state.has_shape else found

    def _joint_reach(self, joint: Joint) -> Upper:
        """At least (αGαᵀ)^{1/2} for the functionals α_ij of centered scores; slopes are αG. As numbers α is
        exact (what it is off by is counted with the slopes), so that all is products: off by γ |α|² |G|_F.
        """
        slopes = self.slopes[..., self.first_width :].unflatten(-1, (self.state.tokens, -1))
        squares = (slopes * self.functionals.whole).sum((-2, -1)).clamp_min(0.0)
        unit = relative_error(2 * len(joint.matrix) + 4 * self.state.width + 4 * self.state.tokens + 64)
        return (Upper(squares) + unit * self.functionals.sizes.square() * joint.size).sqrt()

    @cached_property
    def functionals(self) -> Functionals:
        """How centered scores move with tokens: by the numbers that `by_groups` is made of."""
        return Functionals(self.law, self.by_query, self.by_key)

    def _local(self, shape: Tensor) -> Upper:
        """At least how ellipsoids (n, d, d) of single tokens move centered scores, (n, n)."""
        k = self.key.value
        mean = self.law @ k
        away = (k.unsqueeze(-3) - mean.unsqueeze(-2)).mT  # (n, c, n)
        by_query = _widths(shape, self.query.w @ away)
        by_key = _widths(shape, self.by_key).map(lambda value: value.mT)
        unit = relative_error(4 * self.state.width + 4 * self.state.tokens + 64)
        return by_query + self._centered(by_key) + unit * self._slope_sizes_of(shape)

    def _slope_sizes_of(self, shape: Tensor) -> Upper:
        """At least what the slopes of ellipsoids are made of, (n, 1)."""
        far = trace_roots(shape)
        query, key = self.query, self.key
        k, q = largest_token(computed_lengths(key.value)), computed_lengths(query.value)
        thick_q, thick_k = (computed_lengths(side.w.flatten(-2)) for side in (query, key))
        return (thick_q * far * (2 * k) + q * (2 * largest_token(thick_k * far))).unsqueeze(-1)

    @property
    def moves(self) -> tuple[Upper, Upper, Upper]:
        """At least how centered scores move by u alone, by all else, and what of the latter is a product of
        moves of queries and of keys, or rounding, (n, n).
        """
        d, slopes = self.first_width, self.slopes
        seen = self.seen
        terms = self.state.width + self.query.value.shape[-1] + 2 * self.state.tokens
        unit = relative_error(terms + slopes.shape[-1] + 64)
        lost = unit * self.slope_sizes
        first = self.state.inputs.reach(slopes[..., :d])
        rest = self.by_remainders + lost
        if self.state.curved is not None:
            rest = rest + self._curved_reach
        query, key = self.query, self.key
        others, far = key.rest.unsqueeze(-2), (key.first + key.rest).unsqueeze(-2)
        mixed = self._centered(query.first.unsqueeze(-1) * others + query.rest.unsqueeze(-1) * far)
        rest = rest + self.bilinear + mixed
        shift = relative_error(4 * self.state.tokens + 16) * (first + rest).where(seen).amax(-1).unsqueeze(-1)
        return first.where(seen), (rest + shift).where(seen), (mixed + lost + shift).where(seen)

    @property
    def spread(self) -> Upper:
        """At least (Σ_j P_ij a_ij²)^{1/2} of the moves a by u alone, for each row."""
        d, slopes = self.first_width, self.slopes
        weighted = self.law.sqrt().unsqueeze(-1) * slopes[..., :d]
        spread = form_norms(weighted) if d else exact(torch.zeros(slopes.shape[:-2], dtype=torch.float64))
        return Upper(spread.value, spread.roundings + self.state.tokens + 8)

    @cached_property
    def bilinear(self) -> Upper:
        """At least |uᵀS_ij u| about its mean, S_ij = Q_iᵀK_j, (n, n)."""
        d = self.first_width
        q, k = self.query.moves[..., :d], self.key.moves[..., :d]
        if self._written_out:
            mean = torch.einsum("...ij,...ijkl->...ikl", self.law, self.products_of)
            centered = self.products_of - mean.unsqueeze(-3)
            sizes_of = computed_lengths(q.flatten(-2)), computed_lengths(k.flatten(-2))
            whole = sizes_of[0].unsqueeze(-1) * sizes_of[1].unsqueeze(-2)
            unit = relative_error(q.shape[-2] + 2 * self.state.tokens + 32)
            return reach_of_forms(centered, self.state.own) + unit * (whole + self._mean(whole))
        return self._centered(product_norms(q, k, self.query.first, self.key.first))

    @property
    def _written_out(self) -> bool:
        return is_written_out(self.state.tokens, self.state.tokens, self.first_width)

    @cached_property
    def products_of(self) -> Tensor:
        """Q_iᵀK_j, symmetric, (n, n, d0, d0)."""
        d = self.first_width
        return symmetric(
            torch.einsum("...ick,...jcl->...ijkl", self.query.moves[..., :d], self.key.moves[..., :d])
        )

    @cached_property
    def curved_scores(self) -> Tensor:
        """How H moves centered scores, (n, n, d0, d0)."""
        assert self.state.curved is not None
        forms = self.state.curved
        q, k = (forms.through(side.w.mT).forms for side in (self.query, self.key))
        along = torch.einsum("...jc,...ickl->...ijkl", self.key.value, q) + torch.einsum(
            "...ic,...jckl->...ijkl", self.query.value, k
        )
        return along - torch.einsum("...ij,...ijkl->...ikl", self.law, along).unsqueeze(-3)

    @property
    def _curved_reach(self) -> Upper:
        return reach_of_forms(self.curved_scores, self.state.own)


def largest_token(tokens: Upper) -> Upper:
    """Of all tokens of a head, (1,)."""
    return tokens.amax(-1).unsqueeze(-1)


def _widths(shape: Tensor, directions: Tensor) -> Upper:
    """Those of ellipsoids (n, d, d) along directions (n or 1, d, m), or of each head."""
    if directions.ndim == 3:
        return widths(shape, directions)
    heads, count = len(directions), directions.shape[-1]
    found = widths(shape, directions.movedim(0, -2).flatten(-2))
    return found.map(lambda value: value.unflatten(-1, (heads, count)).movedim(-2, 0))
