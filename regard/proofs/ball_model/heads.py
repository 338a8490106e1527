"""One head near a sequence: its scores, its law, and what becomes of its values (M7)."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths, spectral_norms
from regard._upper import ELEMENTARY, UNIT, Upper, exact, relative_error, sizes
from regard.domains import Neighborhood
from regard.proofs.ball_model.attention_gram import attention_gram
from regard.proofs.ball_model.ellipsoids import Sum, trace_roots, widths
from regard.proofs.ball_model.quadratic import Grams, form_norms, reach_of_forms, split, symmetric
from regard.proofs.ball_model.rows import Row
from regard.proofs.ball_model.scores import Projection, no_scores, products
from regard.proofs.ball_model.sides import Side, all_at_once, group_slopes, product_norms, sides
from regard.proofs.ball_model.state import State
from regard.proofs.near.head import value_matrix
from regard.proofs.setting import pair_bias
from regard.proofs.subject import Head, MultiHead
from regard.proofs.theorem import Refusal

EXPLICIT = 4_000_000
"""Up to how many numbers quadratic forms are written out; beyond, head by head by (M8)."""
STEEPEST = 30.0
"""By how much a score may move: exponentials of more say nothing, and no more is known of a row."""


def is_written_out(rows: int, columns: int, width: int) -> bool:
    """Whether quadratic forms of this many coordinates have room as they are."""
    return rows * columns * width * width <= EXPLICIT


def head_moves(state: State, subject: MultiHead) -> list[HeadMoves]:
    """All heads near a sequence."""
    heads = [HeadMoves(state, subject, number) for number in range(len(subject.separate))]
    for head, stretch in zip(heads, all_at_once(spectral_norms, [head.mixer for head in heads]), strict=True):
        head.stretch = stretch
    for side in range(3):
        made = sides(state, [head.projections[side] for head in heads], by_groups=side == 2)
        for head, one in zip(heads, made, strict=True):
            head.sides.append(one)
    found = group_slopes(state, [head.query for head in heads], [head.key for head in heads])
    for head, slopes in zip(heads, found, strict=True):
        head.by_groups = slopes
    return heads


class HeadMoves:
    """One head near a sequence."""

    def __init__(self, state: State, subject: MultiHead, number: int) -> None:
        head: Head = subject.separate[number]
        if not head.softmax:
            raise Refusal(
                f"rows of {type(head.normalizer).__name__} are not Gibbs laws; the ball model is for Softmax"
            )
        self.state, self.first_width = state, state.linear.shape[-1]
        matrix = value_matrix(head, state.width)
        width = matrix.center.shape[-1]
        self.mixer = torch.eye(width, dtype=torch.float64) if subject.w_o is None else subject.w_o[number]
        self.mixing = computed_lengths(self.mixer.flatten()) if subject.w_o is not None else exact(1.0)
        pair = products.one(head.potential, state.width, torch.arange(state.tokens))
        self.head, self.matrix = head, matrix
        bias = (
            torch.zeros(width, dtype=torch.float64) if head.value_bias is None else head.value_bias.double()
        )
        values = Projection(matrix.center.unsqueeze(0), bias.unsqueeze(0), 0)
        self.projections = (*(pair if pair is not None else no_scores(state.width)), values)
        self.sides: list[Side] = []
        self.by_groups = torch.empty(0)  # how scores move with the groups
        self.stretch = self.mixing  # at least the norm of the mixer
        self.astray = torch.zeros(state.tokens, dtype=torch.bool)  # rows of which nothing is known

    def forget(self) -> None:
        """Drop what is large."""
        kept = {"value_sizes", "form_sizes"}
        _ = self.value_sizes, self.form_sizes
        self.sides.clear()
        self.by_groups = torch.empty(0)
        for name, found in HeadMoves.__dict__.items():
            if isinstance(found, cached_property) and name not in kept:
                self.__dict__.pop(name, None)

    # At the center

    @property
    def query(self) -> Side:
        return self.sides[0]

    @property
    def key(self) -> Side:
        return self.sides[1]

    @property
    def values(self) -> Side:
        return self.sides[2]

    @cached_property
    def scores(self) -> tuple[Tensor, Tensor]:
        """Scores with their fixed biases, and which are seen."""
        bias = pair_bias(self.head, Neighborhood(self.state.center, 0.0))
        scores = self.query.value @ self.key.value.mT
        scores = scores if bias is None else scores + bias
        finite = torch.isfinite(scores)
        if bool((~finite & (scores != -math.inf)).any()):
            raise Refusal("scores leave the range of float64; scale the tokens")
        return scores, finite

    @cached_property
    def law(self) -> Tensor:
        return self.scores[0].softmax(-1)

    @property
    def seen(self) -> Tensor:
        return self.scores[1]

    @cached_property
    def score_error(self) -> Upper:
        """At least how far scores, and logarithms of the law, may be off anywhere in the neighborhood, for
        each row: rounding of projections, products, biases and exponentials.
        """
        count = self.projections[0].roundings + self.projections[1].roundings
        unit = relative_error(self.state.width + count + 16)  # of projections, and then of products of them
        query, key = self.query, self.key
        products_of = (
            unit * (query.whole * key.length.amax() + query.length * key.whole.amax())
            + (unit * query.whole) * (unit * key.whole).amax()
            + relative_error(query.value.shape[-1] + 16) * query.length * key.length.amax()
        )
        largest = sizes(torch.where(self.seen, self.scores[0], 0.0)).amax(-1)
        return (
            products_of
            + relative_error(96) * (largest + 1)
            + Upper((ELEMENTARY + self.state.tokens) * 2 * UNIT, 1)
        )

    @cached_property
    def apart(self) -> Tensor:
        """y_ij = v_j - o_i, (n, n, e)."""
        v = self.values.value
        return v.unsqueeze(0) - (self.law @ v).unsqueeze(1)

    @cached_property
    def apart_sizes(self) -> Upper:
        """At least |y_ij|."""
        return computed_lengths(self.apart) + relative_error(self.state.tokens + 8) * self.values.whole.amax()

    @cached_property
    def value_sizes(self) -> Upper:
        """At least |v_j|, anywhere."""
        return self.values.whole + self.matrix.error * (
            computed_lengths(self.state.center) + self.state.reach
        )

    # Moves of scores

    @cached_property
    def slopes(self) -> Tensor:
        """How centered scores move with u and the groups, (n, n, k)."""
        query, key = self.query, self.key
        along = torch.einsum("jc,ick->ijk", key.value, query.moves) + torch.einsum(
            "ic,jck->ijk", query.value, key.moves
        )
        along = torch.cat([along, self.by_groups], -1)
        return along - torch.einsum("ij,ijk->ik", self.law, along).unsqueeze(1)

    @cached_property
    def slope_sizes(self) -> Upper:
        """At least what slopes are made of, (n, n)."""
        query, key = self.query, self.key
        k, q = computed_lengths(key.value), computed_lengths(query.value)
        along = query.size.unsqueeze(-1) * k + q.unsqueeze(-1) * key.size
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
        found = groups.lengths(self.slopes[..., self.first_width :])
        if groups.beside is not None:
            found = groups.with_beside(found, self._local(groups.beside))
        return found + self._local(self.state.shape) if self.state.has_shape else found

    def _local(self, shape: Tensor) -> Upper:
        """At least how ellipsoids (n, d, d) of single tokens move centered scores, (n, n)."""
        k = self.key.value
        mean = self.law @ k
        away = (k.unsqueeze(0) - mean.unsqueeze(1)).mT  # (n, c, n)
        by_query = widths(shape, self.query.w @ away)
        by_key = widths(shape, self.key.w @ self.query.value.mT.unsqueeze(0)).map(lambda value: value.mT)
        unit = relative_error(4 * self.state.width + 4 * self.state.tokens + 64)
        return by_query + self._centered(by_key) + unit * self._slope_sizes_of(shape)

    def _slope_sizes_of(self, shape: Tensor) -> Upper:
        """At least what the slopes of ellipsoids are made of, (n, 1)."""
        far = trace_roots(shape)
        query, key = self.query, self.key
        k, q = computed_lengths(key.value).amax(), computed_lengths(query.value)
        thick_q, thick_k = (computed_lengths(side.w.flatten(1)) for side in (query, key))
        return (thick_q * far * (2 * k) + q * (2 * (thick_k * far).amax())).unsqueeze(-1)

    @cached_property
    def row(self) -> Row:
        """What is known of the moves of scores."""
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
        mixed = query.first.unsqueeze(-1) * key.rest + query.rest.unsqueeze(-1) * (key.first + key.rest)
        mixed = self._centered(mixed)
        rest = rest + self.bilinear + mixed
        shift = relative_error(4 * self.state.tokens + 16) * (first + rest).where(seen).amax(-1).unsqueeze(-1)
        rest, mixed = (rest + shift).where(seen), (mixed + lost + shift).where(seen)
        first = first.where(seen)
        self.astray = ~((first + rest).amax(-1).bound <= STEEPEST)
        found = self._row(*(part.where(~self.astray.unsqueeze(-1)) for part in (first, rest, mixed)))
        beyond = (Upper(self.law) * (found.up + found.down).halved() * self.apart_sizes).sum(-1)
        wide = self.apart_sizes.where(seen).amax(-1)
        longer = ~(beyond.bound <= wide.bound) & ~self.astray
        if not bool(longer.any()):
            return found
        self.astray = self.astray | longer
        return self._row(*(part.where(~self.astray.unsqueeze(-1)) for part in (first, rest, mixed)))

    def _row(self, first: Upper, rest: Upper, mixed: Upper) -> Row:
        """With what is known of the spread of scores."""
        d, slopes = self.first_width, self.slopes
        weighted = self.law.sqrt().unsqueeze(-1) * slopes[..., :d]
        spread = form_norms(weighted) if d else exact(torch.zeros(self.state.tokens, dtype=torch.float64))
        spread = Upper(spread.value, spread.roundings + self.state.tokens + 8)
        return Row(self.law, first, rest, mixed, spread)

    @cached_property
    def bilinear(self) -> Upper:
        """At least |uᵀS_ij u| about its mean, S_ij = Q_iᵀK_j, (n, n)."""
        d = self.first_width
        q, k = self.query.moves[..., :d], self.key.moves[..., :d]
        if self._written_out:
            centered = self.products_of - torch.einsum("ij,ijkl->ikl", self.law, self.products_of).unsqueeze(
                1
            )
            whole = computed_lengths(q.flatten(1)).unsqueeze(-1) * computed_lengths(k.flatten(1))
            unit = relative_error(q.shape[1] + 2 * self.state.tokens + 32)
            return reach_of_forms(centered, self.state.own) + unit * (whole + self._mean(whole))
        return self._centered(product_norms(q, k, self.query.first, self.key.first))

    @property
    def _written_out(self) -> bool:
        return is_written_out(self.state.tokens, self.state.tokens, self.first_width)

    @cached_property
    def products_of(self) -> Tensor:
        """Q_iᵀK_j, symmetric, (n, n, d0, d0)."""
        d = self.first_width
        return symmetric(torch.einsum("ick,jcl->ijkl", self.query.moves[..., :d], self.key.moves[..., :d]))

    # What comes out

    @cached_property
    def value(self) -> Tensor:
        """o_i, and the middle of what E_j may be."""
        row = self.row
        middle = self.law * (row.up.bound - row.down.bound) / 2
        return self.law @ self.values.value + torch.einsum("ij,ijd->id", middle, self.apart)

    @cached_property
    def derivative(self) -> Tensor:
        """Of o_i by u and the groups, (n, e, k)."""
        direct = torch.einsum("ij,jdk->idk", self.law, self.values.moves)
        return self._known(direct + (self.law.unsqueeze(-1) * self.apart).mT @ self.slopes)

    def _known(self, rows: Tensor) -> Tensor:
        """Zero for rows of which nothing is known."""
        _ = self.row
        if not bool(self.astray.any()):
            return rows
        return torch.where(self.astray.reshape(-1, *[1] * (rows.ndim - 1)), 0.0, rows)

    @property
    def metric(self) -> Tensor:
        """Lengths of values after they are mixed, and a little of their own, which keeps them positive."""
        square = self.mixer @ self.mixer.mT
        least = (1e-4 * square.diagonal().mean()).clamp_min(1e-200)
        return square + least * torch.eye(len(square), dtype=torch.float64)

    def rest(self, quadratic: bool) -> Sum:
        """Everything beyond the first two orders as moves of values, and with `quadratic` the second one."""
        row, n, d = self.row, self.state.tokens, self.first_width
        law = Upper(self.law, n + 4)
        inner = Sum(n, len(self.mixer), self.metric)
        half = (law * (row.up + row.down)).halved()
        inner.segments((self.apart * half.bound.unsqueeze(-1)).mT)
        first = self.values.moves[..., :d]
        inner.mixture(law * row.factor, first @ first.mT, computed_lengths(first.flatten(1)), d)
        # the rest of a value's move is multiplied by e^a/Z - 1
        times = law * row.change.minimum(row.factor + row.first)
        around = self.values.around
        inner.mixture(times, around, trace_roots(around), 1)
        if quadratic:
            offset, around = self.second
            inner.segments(0.5 * offset.unsqueeze(-1)).shape(around)
        return inner

    @cached_property
    def lost(self) -> Upper:
        """What rounding hides in the output: of the law, of values, of derivatives."""
        n, row = self.state.tokens, self.row
        unit = relative_error(self.state.width + 4 * n + len(self.mixer) + self.query.value.shape[-1] + 64)
        law = Upper(self.law, n + 4)
        changed = (2 * self.score_error).expm1() * self.farthest
        values = (unit * self.values.whole + self.value_sizes_error).amax()
        moved = (law * (self.values.size.unsqueeze(0) + self.apart_sizes * self.slope_sizes)).sum(-1)
        middle = (law * (row.up + row.down) * self.apart_sizes).sum(-1)
        reach = row.reach
        off = (law * (row.up + row.down + 2 * reach + reach.square())).sum(-1) * self.apart_error
        return changed + values + unit * (moved + middle) + off

    @property
    def farthest(self) -> Upper:
        """At least how far values are anywhere from o_i at the center, in the mean of any law there, which
        has at most e^ā P_j at a key: what changed laws make of it.
        """
        moved = self.values.first + self.values.rest + self.value_sizes_error
        blur = relative_error(self.state.width + 8) * self.values.whole
        away = (self.apart_sizes + moved + blur).where(self.seen)
        law = (
            Upper(self.law, self.state.tokens + 4)
            * (self.row.reach + 2 * self.score_error.unsqueeze(-1)).exp()
        )
        return away.amax(-1).minimum((law * away).sum(-1))

    @property
    def value_sizes_error(self) -> Upper:
        return self.matrix.error * (computed_lengths(self.state.center) + self.state.reach)

    @property
    def apart_error(self) -> Upper:
        """How far y_ij may be off."""
        return relative_error(self.state.width + self.state.tokens + 16) * (2 * self.values.whole.amax())

    # The second order

    @cached_property
    def form_sizes(self) -> Upper:
        """At least what quadratic forms are made of, for each row."""
        d, law = self.first_width, Upper(self.law, self.state.tokens + 4)
        q, k, v = (
            computed_lengths(side.moves[..., :d].flatten(1)) for side in (self.query, self.key, self.values)
        )
        slopes = computed_lengths(self.slopes[..., :d])
        scores = q.unsqueeze(-1) * k + slopes.square()
        return (law * (self.apart_sizes * scores + slopes * v)).sum(-1)

    @cached_property
    def forms(self) -> Tensor:
        """Σ_j P_ij [y_ij (S_ij + α_ijα_ijᵀ/2) + α_ij V_jᵀ], symmetric, (n, e, d0, d0)."""
        d = self.first_width
        slopes, weighted = self.slopes[..., :d], self.law.unsqueeze(-1) * self.apart
        squares = self.products_of + 0.5 * slopes.unsqueeze(-1) * slopes.unsqueeze(-2)
        found = (weighted.mT @ squares.flatten(2)).unflatten(-1, (d, d))
        moved = torch.einsum("ijk,jcl->ickl", self.law.unsqueeze(-1) * slopes, self.values.moves[..., :d])
        return self._known(found + symmetric(moved))

    @cached_property
    def second(self) -> tuple[Tensor, Tensor]:
        """The same without writing the forms out (M8): a one-sided move, and the shape of the rest."""
        d, state = self.first_width, self.state
        q, k, v = (side.moves[..., :d] for side in (self.query, self.key, self.values))
        gram, inner = attention_gram(self.law, self.apart, self.slopes[..., :d], (q, k, v), state.own.square)
        unit, size = self._form_unit, self.form_sizes
        whole = computed_lengths(state.own.square.flatten(1))
        grams = Grams(gram, 16 * unit * size.square(), inner, 16 * unit * size * whole)
        offset, around = split(grams, state.own)
        return self._known(offset), self._known(around)

    @property
    def quadratic_center(self) -> Tensor:
        """The middle of the one-sided part."""
        return 0.5 * self.second[0]

    @property
    def quadratic_lost(self) -> Upper:
        """What rounding hides of the second order."""
        return relative_error(4) * computed_lengths(self.second[0]) + self._form_unit * self.form_sizes

    @property
    def _form_unit(self) -> Upper:
        return relative_error(
            4 * self.state.tokens + 4 * self.first_width + 2 * self.query.value.shape[-1] + 128
        )

    @cached_property
    def curved_scores(self) -> Tensor:
        """How H moves centered scores, (n, n, d0, d0)."""
        assert self.state.curved is not None
        forms = self.state.curved
        q, k = (forms.through(side.w.mT).forms for side in (self.query, self.key))
        along = torch.einsum("jc,ickl->ijkl", self.key.value, q) + torch.einsum(
            "ic,jckl->ijkl", self.query.value, k
        )
        return along - torch.einsum("ij,ijkl->ikl", self.law, along).unsqueeze(1)

    @property
    def _curved_reach(self) -> Upper:
        return reach_of_forms(self.curved_scores, self.state.own)

    @cached_property
    def curved(self) -> Tensor:
        """What becomes of H, (n, e, d0, d0)."""
        assert self.state.curved is not None
        values = self.state.curved.through(self.values.w.mT).forms
        direct = torch.einsum("ij,jckl->ickl", self.law, values)
        weighted = self.law.unsqueeze(-1) * self.apart
        along = (weighted.mT @ self.curved_scores.flatten(2)).unflatten(-1, self.curved_scores.shape[2:])
        return self._known(direct + along)
