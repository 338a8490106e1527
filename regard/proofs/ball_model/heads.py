"""Heads near a sequence: their scores, their laws, and what becomes of their values (M7).

Heads of one shape are taken together: all tensors have a first dimension of heads then, which is not named
below, and none where there is one head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import ELEMENTARY, UNIT, Upper, exact, relative_error, sizes
from regard.proofs.ball_model.ellipsoids import Sum, trace_roots, widths
from regard.proofs.ball_model.functionals import Functionals
from regard.proofs.ball_model.joint import Joint
from regard.proofs.ball_model.quadratic import form_norms, reach_of_forms, symmetric
from regard.proofs.ball_model.rows import Row
from regard.proofs.ball_model.sides import Side, directions, group_slopes, product_norms, projected
from regard.proofs.ball_model.state import State
from regard.proofs.theorem import Refusal

EXPLICIT = 4_000_000
"""Up to how many numbers quadratic forms are written out; beyond, head by head by (M8)."""
STEEPEST = 30.0
"""By how much a score may move: exponentials of more say nothing, and no more is known of a row."""


def is_written_out(rows: int, columns: int, width: int) -> bool:
    """Whether quadratic forms of this many coordinates have room as they are."""
    return rows * columns * width * width <= EXPLICIT


@dataclass(eq=False)
class HeadMoves:
    """Heads of one shape near a sequence.

    mixer (e, d), with at least its norms: `mixing` in Frobenius, `stretch` in spectral norm. blurred: at
    least how far the matrix of values is off. bias (n, n) of pairs, -inf for what is hidden. roundings: of
    both projections of scores. sides: queries, keys and values. by_groups (n, n, k): how scores move with the
    groups.
    """

    state: State
    mixer: Tensor
    mixing: Upper
    stretch: Upper
    blurred: Upper
    bias: Tensor | None
    roundings: int
    sides: tuple[Side, ...]
    by_groups: Tensor

    def __post_init__(self) -> None:
        self.first_width = self.state.linear.shape[-1]
        self.astray = torch.zeros(self.query.value.shape[:-1], dtype=torch.bool)
        """Rows of which nothing is known."""

    @property
    def count(self) -> int:
        """How many heads there are."""
        return 1 if self.mixer.ndim == 2 else len(self.mixer)

    def each(self, tensor: Tensor) -> Iterator[Tensor]:
        """That of every head."""
        return iter(tensor.unsqueeze(0) if self.mixer.ndim == 2 else tensor)

    def side_by_side(self, rows: Tensor) -> Tensor:
        """The coordinates of all heads for each token, (n, e, …) of every head to (n, Σe, …)."""
        return rows if self.mixer.ndim == 2 else rows.transpose(0, 1).flatten(1, 2)

    def forget(self) -> None:
        """Drop what is large."""
        kept = {"value_sizes", "form_sizes"}
        _ = self.value_sizes, self.form_sizes
        self.sides, self.by_groups = (), torch.empty(0)
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
        scores = self.query.value @ self.key.value.mT
        scores = scores if self.bias is None else scores + self.bias
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
        unit = relative_error(
            self.state.width + self.roundings + 16
        )  # of projections, and then of products of them
        query, key = self.query, self.key
        products_of = (
            unit * (query.whole * _largest(key.length) + query.length * _largest(key.whole))
            + (unit * query.whole) * _largest(unit * key.whole)
            + relative_error(query.value.shape[-1] + 16) * query.length * _largest(key.length)
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
        return v.unsqueeze(-3) - (self.law @ v).unsqueeze(-2)

    @cached_property
    def apart_sizes(self) -> Upper:
        """At least |y_ij|."""
        rounding = relative_error(self.state.tokens + 8) * _largest(self.values.whole)
        return computed_lengths(self.apart) + rounding.unsqueeze(-1)

    @cached_property
    def value_sizes(self) -> Upper:
        """At least |v_j|, anywhere."""
        return self.values.whole + self.value_sizes_error

    # Moves of scores

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
        """How centered scores move with tokens."""
        return Functionals(self.law, directions(self.query, self.key), directions(self.key, self.query))

    def _local(self, shape: Tensor) -> Upper:
        """At least how ellipsoids (n, d, d) of single tokens move centered scores, (n, n)."""
        k = self.key.value
        mean = self.law @ k
        away = (k.unsqueeze(-3) - mean.unsqueeze(-2)).mT  # (n, c, n)
        by_query = _widths(shape, self.query.w @ away)
        by_key = _widths(shape, self.key.w @ self.query.value.mT.unsqueeze(-3)).map(lambda value: value.mT)
        unit = relative_error(4 * self.state.width + 4 * self.state.tokens + 64)
        return by_query + self._centered(by_key) + unit * self._slope_sizes_of(shape)

    def _slope_sizes_of(self, shape: Tensor) -> Upper:
        """At least what the slopes of ellipsoids are made of, (n, 1)."""
        far = trace_roots(shape)
        query, key = self.query, self.key
        k, q = _largest(computed_lengths(key.value)), computed_lengths(query.value)
        thick_q, thick_k = (computed_lengths(side.w.flatten(-2)) for side in (query, key))
        return (thick_q * far * (2 * k) + q * (2 * _largest(thick_k * far))).unsqueeze(-1)

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
        others, far = key.rest.unsqueeze(-2), (key.first + key.rest).unsqueeze(-2)
        mixed = self._centered(query.first.unsqueeze(-1) * others + query.rest.unsqueeze(-1) * far)
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
        spread = form_norms(weighted) if d else exact(torch.zeros(slopes.shape[:-2], dtype=torch.float64))
        spread = Upper(spread.value, spread.roundings + self.state.tokens + 8)
        return Row(self.law, first, rest, mixed, spread)

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

    @property
    def passing_sizes(self) -> Upper:
        """At least the sizes that Σ_j P_ij (W_v + y_ij α_ij) is made of, (n,)."""
        thick = computed_lengths(self.values.w.flatten(-2)).unsqueeze(-2)
        law = Upper(self.law, self.state.tokens + 4)
        return (law * (thick + self.apart_sizes * self.functionals.sizes)).sum(-1)

    # What comes out

    @cached_property
    def value(self) -> Tensor:
        """o_i, and the middle of what E_j may be."""
        row = self.row
        middle = self.law * (row.up.bound - row.down.bound) / 2
        return self.law @ self.values.value + torch.einsum("...ij,...ijd->...id", middle, self.apart)

    @property
    def derivative(self) -> Tensor:
        """Of o_i by u and the groups, heads side by side, (n, Σe, k)."""
        return self._passed_on(self.values.moves, self.slopes)

    def times(self, columns: Tensor) -> Tensor:
        """The same of other columns (n, d, k)."""
        w = self.values.w
        single = w.ndim == 3
        by_query, by_key = self.functionals.by_query, self.functionals.by_key
        if single:
            w, by_query, by_key = w.unsqueeze(0), by_query.unsqueeze(0), by_key.unsqueeze(0)
        values, slopes = projected(w, columns), group_slopes(columns, by_query, by_key)
        values, slopes = (values[0], slopes[0]) if single else (values, slopes)
        return self._passed_on(values, slopes - self.law.unsqueeze(-2) @ slopes)

    def _passed_on(self, values: Tensor, slopes: Tensor) -> Tensor:
        """Σ_j P_ij (V_j + y_ij α_ij) for moves of values (n, e, k) and centered scores (n, n, k)."""
        weighted = self.known((self.law.unsqueeze(-1) * self.apart).mT)
        law, width, columns = self.known(self.law), self.mixer.shape[-2], slopes.shape[-1]
        found = law.new_empty(self.state.tokens, self.count, width, columns)
        heads = zip(*(self.each(part) for part in (law, values, weighted, slopes)), strict=True)
        for g, (p, direct, y, along) in enumerate(heads):  # one is in the cache, all are not
            direct = (p @ direct.flatten(1)).unflatten(-1, (width, columns))
            found[:, g] = direct.baddbmm_(y, along)
        return found.flatten(1, 2)

    def known(self, rows: Tensor) -> Tensor:
        """Zero for rows of which nothing is known."""
        _ = self.row
        if not bool(self.astray.any()):
            return rows
        astray = self.astray.reshape(*self.astray.shape, *[1] * (rows.ndim - self.astray.ndim))
        return torch.where(astray, 0.0, rows)

    @property
    def metric(self) -> Tensor:
        """Lengths of values after they are mixed, and a little of their own, which keeps them positive, (1,
        e, e).
        """
        square = (self.mixer @ self.mixer.mT).unsqueeze(-3)
        least = (1e-4 * square.diagonal(dim1=-2, dim2=-1).mean(-1)).clamp_min(1e-200)
        return square + least[..., None, None] * torch.eye(square.shape[-1], dtype=torch.float64)

    @property
    def rest(self) -> Sum:
        """Everything beyond the first two orders as moves of values."""
        row, d = self.row, self.first_width
        law = Upper(self.law, self.state.tokens + 4)
        inner = Sum(self.astray.shape, self.mixer.shape[-2], self.metric)
        half = (law * (row.up + row.down)).halved()
        inner.segments((self.apart * half.bound.unsqueeze(-1)).mT)
        first = self.values.moves[..., :d]
        inner.mixture(law * row.factor, first @ first.mT, computed_lengths(first.flatten(-2)), d)
        # the rest of a value's move is multiplied by e^a/Z - 1
        times = law * row.change.minimum(row.factor + row.first)
        around = self.values.around
        return inner.mixture(times, around, trace_roots(around), 1)

    @cached_property
    def lost(self) -> Upper:
        """What rounding hides in the output: of the law, of values, of derivatives."""
        n, row = self.state.tokens, self.row
        unit = relative_error(
            self.state.width + 4 * n + self.mixer.shape[-2] + self.query.value.shape[-1] + 64
        )
        law = Upper(self.law, n + 4)
        changed = (2 * self.score_error).expm1() * self.farthest
        values = _largest(unit * self.values.whole + self.value_sizes_error)
        moved = (law * (self.values.size.unsqueeze(-2) + self.apart_sizes * self.slope_sizes)).sum(-1)
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
        away = (self.apart_sizes + (moved + blur).unsqueeze(-2)).where(self.seen)
        law = (
            Upper(self.law, self.state.tokens + 4)
            * (self.row.reach + 2 * self.score_error.unsqueeze(-1)).exp()
        )
        return away.amax(-1).minimum((law * away).sum(-1))

    @property
    def value_sizes_error(self) -> Upper:
        return self.blurred.unsqueeze(-1) * (computed_lengths(self.state.center) + self.state.reach)

    @property
    def apart_error(self) -> Upper:
        """How far y_ij may be off, (1,)."""
        return relative_error(self.state.width + self.state.tokens + 16) * (2 * _largest(self.values.whole))

    # The second order

    @cached_property
    def form_sizes(self) -> Upper:
        """At least what quadratic forms are made of, for each row."""
        d, law = self.first_width, Upper(self.law, self.state.tokens + 4)
        q, k, v = (
            computed_lengths(side.moves[..., :d].flatten(-2)) for side in (self.query, self.key, self.values)
        )
        slopes = computed_lengths(self.slopes[..., :d])
        scores = q.unsqueeze(-1) * k.unsqueeze(-2) + slopes.square()
        return (law * (self.apart_sizes * scores + slopes * v.unsqueeze(-2))).sum(-1)

    @property
    def quadratic_lost(self) -> Upper:
        """What rounding hides of the second order."""
        return self.form_unit * self.form_sizes

    @property
    def form_unit(self) -> Upper:
        return relative_error(
            4 * self.state.tokens + 4 * self.first_width + 2 * self.query.value.shape[-1] + 128
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


def _largest(tokens: Upper) -> Upper:
    """Of all tokens of a head, (1,)."""
    return tokens.amax(-1).unsqueeze(-1)


def _widths(shape: Tensor, directions: Tensor) -> Upper:
    """Those of ellipsoids (n, d, d) along directions (n or 1, d, m), or of each head."""
    if directions.ndim == 3:
        return widths(shape, directions)
    heads, count = len(directions), directions.shape[-1]
    found = widths(shape, directions.movedim(0, -2).flatten(-2))
    return found.map(lambda value: value.unflatten(-1, (heads, count)).movedim(-2, 0))
