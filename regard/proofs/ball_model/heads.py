"""Heads near a sequence: what becomes of their values (M7).

Heads of one shape are taken together: all tensors have a first dimension of heads then, which is not named
below, and none where there is one head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper, relative_error
from regard.proofs.ball_model.ellipsoids import Sum, trace_roots
from regard.proofs.ball_model.rows import Row
from regard.proofs.ball_model.score_moves import ScoreMoves, largest_token
from regard.proofs.ball_model.sides import Side, group_slopes, projected
from regard.proofs.ball_model.state import State

STEEPEST = 30.0
"""By how much a score may move: exponentials of more say nothing, and no more is known of a row."""


@dataclass(eq=False)
class HeadMoves:
    """Heads of one shape near a sequence.

    mixer (e, d), with at least its norms: `mixing` in Frobenius, `stretch` in spectral norm. blurred: at
    least how far the matrix of values is off.
    """

    state: State
    mixer: Tensor
    mixing: Upper
    stretch: Upper
    blurred: Upper
    scores: ScoreMoves
    values: Side

    def __post_init__(self) -> None:
        self.astray = torch.zeros(self.scores.query.value.shape[:-1], dtype=torch.bool)
        """Rows of which nothing is known."""

    @property
    def first_width(self) -> int:
        """How many directions u has."""
        return self.scores.first_width

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
        made = [name for name, found in HeadMoves.__dict__.items() if isinstance(found, cached_property)]
        for name in {"scores", "values", *made} - kept:
            self.__dict__.pop(name, None)

    @property
    def sides(self) -> tuple[Side, Side, Side]:
        """Queries, keys and values."""
        return self.scores.query, self.scores.key, self.values

    @property
    def law(self) -> Tensor:
        """P at the center."""
        return self.scores.law

    @cached_property
    def apart(self) -> Tensor:
        """y_ij = v_j - o_i, (n, n, e)."""
        v = self.values.value
        return v.unsqueeze(-3) - (self.law @ v).unsqueeze(-2)

    @cached_property
    def apart_sizes(self) -> Upper:
        """At least |y_ij|."""
        rounding = relative_error(self.state.tokens + 8) * largest_token(self.values.whole)
        return computed_lengths(self.apart) + rounding.unsqueeze(-1)

    @cached_property
    def value_sizes(self) -> Upper:
        """At least |v_j|, anywhere."""
        return self.values.whole + self.value_sizes_error

    @property
    def value_sizes_error(self) -> Upper:
        return self.blurred.unsqueeze(-1) * (computed_lengths(self.state.center) + self.state.reach)

    @property
    def apart_error(self) -> Upper:
        """How far y_ij may be off, (1,)."""
        unit = relative_error(self.state.width + self.state.tokens + 16)
        return unit * (2 * largest_token(self.values.whole))

    @cached_property
    def row(self) -> Row:
        """What is known of the moves of scores."""
        moves, seen = self.scores.moves, self.scores.seen
        first, rest, _ = moves
        self.astray = ~((first + rest).amax(-1).bound <= STEEPEST)
        found = self._row(moves)
        beyond = (Upper(self.law) * (found.up + found.down).halved() * self.apart_sizes).sum(-1)
        wide = self.apart_sizes.where(seen).amax(-1)
        longer = ~(beyond.bound <= wide.bound) & ~self.astray
        if not bool(longer.any()):
            return found
        self.astray = self.astray | longer
        return self._row(moves)

    def _row(self, moves: tuple[Upper, Upper, Upper]) -> Row:
        """Without rows of which nothing is known."""
        first, rest, mixed = (part.where(~self.astray.unsqueeze(-1)) for part in moves)
        return Row(self.law, first, rest, mixed, self.scores.spread)

    @property
    def passing_sizes(self) -> Upper:
        """At least the sizes that Σ_j P_ij (W_v + y_ij α_ij) is made of, (n,)."""
        thick = computed_lengths(self.values.w.flatten(-2)).unsqueeze(-2)
        law = Upper(self.law, self.state.tokens + 4)
        return (law * (thick + self.apart_sizes * self.scores.functionals.sizes)).sum(-1)

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
        return self._passed_on(self.values.moves, self.scores.slopes)

    def times(self, columns: Tensor) -> Tensor:
        """The same of other columns (n, d, k)."""
        w = self.values.w
        single = w.ndim == 3
        by_query, by_key = self.scores.by_query, self.scores.by_key
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
            self.state.width + 4 * n + self.mixer.shape[-2] + self.scores.query.value.shape[-1] + 64
        )
        law = Upper(self.law, n + 4)
        changed = (2 * self.scores.score_error).expm1() * self.farthest
        values = largest_token(unit * self.values.whole + self.value_sizes_error)
        moved = (law * (self.values.size.unsqueeze(-2) + self.apart_sizes * self.scores.slope_sizes)).sum(-1)
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
        away = (self.apart_sizes + (moved + blur).unsqueeze(-2)).where(self.scores.seen)
        law = (
            Upper(self.law, self.state.tokens + 4)
            * (self.row.reach + 2 * self.scores.score_error.unsqueeze(-1)).exp()
        )
        return away.amax(-1).minimum((law * away).sum(-1))

    # The second order

    @cached_property
    def form_sizes(self) -> Upper:
        """At least what quadratic forms are made of, for each row."""
        d, law = self.first_width, Upper(self.law, self.state.tokens + 4)
        q, k, v = (computed_lengths(side.moves[..., :d].flatten(-2)) for side in self.sides)
        slopes = computed_lengths(self.scores.slopes[..., :d])
        scores = q.unsqueeze(-1) * k.unsqueeze(-2) + slopes.square()
        return (law * (self.apart_sizes * scores + slopes * v.unsqueeze(-2))).sum(-1)

    @property
    def quadratic_lost(self) -> Upper:
        """What rounding hides of the second order."""
        return self.form_unit * self.form_sizes

    @property
    def form_unit(self) -> Upper:
        return relative_error(
            4 * self.state.tokens + 4 * self.first_width + 2 * self.scores.query.value.shape[-1] + 128
        )
