"""Remainders that several tokens share: Σ_g B_ig w_g with |w_g| ≤ 1."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper, relative_error, root
from regard.proofs.ball_model.ellipsoids import (
    SMALLEST,
    Sum,
    lift,
    lifted,
    pushed,
    trace_roots,
    turned,
    widths,
)
from regard.proofs.ball_model.updates import (
    Map,
    product_size,
    symmetric_products,
    whole_of,
)

_NUMBERS = itertools.count()


def fresh_names(count: int) -> Tensor:
    """Numbers that no column and no group has yet."""
    return torch.tensor([next(_NUMBERS) for _ in range(count)], dtype=torch.long)


@dataclass(frozen=True)
class Groups:
    """B (n, d, k) as numbers; the column k is named `labels`[k] and belongs to the group `owner`[k].

    B is `base`, or `turn` times that where the product was put off: maps that follow each other are
    multiplied with each other first, which is less work where there are many columns.
    """

    base: Tensor
    labels: Tensor
    owner: Tensor
    turn: Tensor | None = None
    filled: tuple[int, ...] | None = None
    """After how many columns those of a token are zero, where that is known."""
    beside: Tensor | None = None
    """Of an only group: T (n, d, d), for moves t_i of single tokens in the same ball. |w|² + ν_i² ≤ 1 for
    every token, with t_i in ν_i times the ellipsoid of T_i (M11).
    """

    @cached_property
    def columns(self) -> Tensor:
        return self.base if self.turn is None else self.turn @ self.base

    @property
    def is_put_off(self) -> bool:
        return self.turn is not None and "columns" not in self.__dict__

    @property
    def shape(self) -> tuple[int, int, int]:
        """(n, d, k)."""
        n, width, count = self.base.shape
        return n, width if self.turn is None else self.turn.shape[-2], count

    @cached_property
    def _index(self) -> tuple[int, Tensor]:
        found, index = torch.unique(self.owner, return_inverse=True)
        return len(found), index

    @property
    def sizes(self) -> Upper:
        """At least |B_ig|_F, (n, groups); |T_i|_F |B_ig|_F of what was put off, which products with it are
        made of.
        """
        if self.turn is None or not self.is_put_off:
            return self._sizes
        return computed_lengths(self.turn.flatten(-2)).unsqueeze(-1) * self._base_sizes

    @cached_property
    def _sizes(self) -> Upper:
        return self._lengths_of(self.columns)

    @cached_property
    def _base_sizes(self) -> Upper:
        return self._lengths_of(self.base)

    def _lengths_of(self, columns: Tensor) -> Upper:
        if self.is_single:
            gathered = torch.linalg.vector_norm(columns, dim=2).square().sum(1, keepdim=True)
        else:
            gathered = self._gathered(torch.linalg.vector_norm(columns, dim=1).square())
        return Upper(gathered, sum(columns.shape[1:]) + 8).sqrt()

    @property
    def _is_many(self) -> bool:
        """Whether products are put off."""
        return self.shape[-1] > 2 * self.shape[1]

    @property
    def made_of(self) -> Upper:
        """At least what images of all groups are made of, for each token: with |M| the size of a map, they
        are off by at most γ |M| of it for the product of maps, and as much for that with columns.
        """
        whole = self.sizes.sum(-1)
        return root(self.shape[1]) * whole if self._is_many and not self.is_put_off else whole

    @property
    def whole_energy(self) -> float:
        """About how much all columns move all tokens, squared."""
        return float(torch.linalg.vector_norm(self.columns)) ** 2

    @property
    def energy(self) -> Tensor:
        """About how much each column moves all tokens, squared."""
        return torch.linalg.vector_norm(self.columns, dim=(0, 1)).square()

    @property
    def is_single(self) -> bool:
        return self._index[0] == 1

    @property
    def index(self) -> Tensor:
        """To which group a column belongs, counted from zero."""
        return self._index[1]

    @property
    def lengths_of_all(self) -> Tensor:
        """About |B_g|_F of all tokens together, (groups,)."""
        return computed_lengths(self._sizes.bound.mT).bound

    @property
    def is_moving(self) -> Tensor:
        """Which tokens are not points, (n,)."""
        moving = (self.columns != 0).flatten(1).any(-1)
        return moving if self.beside is None else moving | (self.beside != 0).flatten(1).any(-1)

    def reach(self, directions: Tensor) -> Upper:
        """At least Σ_g |B_igᵀa| for directions (n or 1, d, m), (n, m), with what is beside them."""
        if (known := self.known_ellipsoid) is not None:
            return widths(known, directions)
        rounding = relative_error(self.shape[1] + 4) * self._sizes.sum(-1).unsqueeze(-1)
        found = self.lengths(directions.mT @ self.columns)
        found = found if self.beside is None else self.with_beside(found, widths(self.beside, directions))
        return found + rounding * computed_lengths(directions.mT)

    @staticmethod
    def with_beside(shared: Upper, alone: Upper) -> Upper:
        """At least |w| p + ν q for |w|² + ν² ≤ 1: what columns and single tokens do together."""
        return (shared.square() + alone.square()).sqrt()

    def lengths(self, slopes: Tensor) -> Upper:
        """At least Σ_g |b_g| for slopes (..., k)."""
        return Upper(self._gathered(slopes.square()), slopes.shape[-1] + 3).sqrt().sum(-1)

    def _gathered(self, squares: Tensor) -> Tensor:
        """Sums over the columns of each group, (..., k) to (..., groups)."""
        count, index = self._index
        return squares.new_zeros(*squares.shape[:-1], count).index_add_(-1, index, squares)

    @cached_property
    def ellipsoid(self) -> Tensor:
        """One that holds what all groups do to a token, (n, d, d)."""
        return self._square if self.is_single else self.merged_into(Sum(*self.shape[:2])).done()

    @property
    def known_ellipsoid(self) -> Tensor | None:
        """At least B_iB_iᵀ, where that was made, of a single group."""
        return self.__dict__.get("ellipsoid") if self.is_single else None

    def with_ellipsoid(self, shape: Tensor) -> Groups:
        """The same, with an ellipsoid that is known."""
        self.__dict__["ellipsoid"] = shape
        return self

    def through(self, matrix: Map) -> Groups:
        """Their images; an ellipsoid that was made goes with them, and holds the rounded columns too: they
        are off by 2γ |M|_F `made_of`, and |B|_F² ≤ tr Q.
        """
        after = self._put_off(matrix) if self._is_many else self.replaced(matrix @ self.columns)
        if self.beside is not None:
            after = replace(after, beside=pushed(matrix, self.beside))
        if "ellipsoid" not in self.__dict__:
            return after
        whole = (trace_roots(self.ellipsoid) + self.made_of) * product_size(matrix)
        error = relative_error(8 * self.shape[1] + 64) * whole.square()
        return after.with_ellipsoid(lifted(turned(matrix, self.ellipsoid), error))

    def _put_off(self, matrix: Map) -> Groups:
        """Products of maps instead of columns."""
        if self.turn is None or not self.is_put_off:
            whole = whole_of(matrix).expand(len(self.base), -1, -1)
            return Groups(self.columns, self.labels, self.owner, whole)
        after = Groups(self.base, self.labels, self.owner, matrix @ self.turn)
        if "_base_sizes" in self.__dict__:
            after.__dict__["_base_sizes"] = self._base_sizes
        return after

    def replaced(self, columns: Tensor) -> Groups:
        """The same groups with other matrices."""
        return Groups(columns, self.labels, self.owner)

    def where(self, kept: Tensor) -> Groups:
        """Nothing for tokens where the mask (n, 1, 1) is false."""
        after = self.replaced(torch.where(kept, self.columns, 0.0))
        return after if self.beside is None else replace(after, beside=torch.where(kept, self.beside, 0.0))

    def plus(self, other: Groups) -> Groups:
        """The sum; columns of one name add."""
        if len(self.labels) == len(other.labels) and bool((other.labels == self.labels).all()):
            return replace(other.replaced(other.columns + self.columns), beside=self._both_beside(other))
        if len(self.labels) <= len(other.labels) and bool(
            (other.labels[: len(self.labels)] == self.labels).all()
        ):
            joined = other.columns.clone()
            joined[..., : len(self.labels)] += self.columns
            return other.replaced(joined)
        place = {label: k for k, label in enumerate(other.labels.tolist())}
        shared = torch.tensor([label in place for label in self.labels.tolist()], dtype=torch.bool)
        where = torch.tensor([place[label] for label in self.labels[shared].tolist()], dtype=torch.long)
        joined = other.columns.index_add(-1, where, self.columns[..., shared])
        return side_by_side(other.replaced(joined), self.of(~shared))

    def _both_beside(self, other: Groups) -> Tensor | None:
        """ν (t_i + t_i'), for the same ν."""
        if self.beside is None or other.beside is None:
            return self.beside if other.beside is None else other.beside
        return Sum(*self.shape[:2]).shape(self.beside).shape(other.beside).done()

    def of(self, chosen: Tensor) -> Groups:
        """Some of the columns, without what is beside them."""
        return Groups(self.columns[..., chosen], self.labels[chosen], self.owner[chosen])

    def pieces(self) -> Iterator[Tensor]:
        """The matrix of each group, all tokens together, (n d, columns)."""
        count, index = self._index
        return (self.columns[..., index == group].flatten(0, 1) for group in range(count))

    def merged_into(self, found: Sum) -> Sum:
        """Each group as an ellipsoid of the sum."""
        if not self.shape[-1]:
            return found
        if self.is_single:
            return found.shape(self.ellipsoid)
        weight = self._sizes.value.clamp_min(SMALLEST)
        size = Upper(self._sizes.value.square() / weight, 2 * self._sizes.roundings + 3).sum(-1)
        error = relative_error(self.columns.shape[-1] + 8) * size
        matrix = (self.columns / weight[:, self.index].unsqueeze(1)) @ self.columns.mT
        return found.add(Upper(weight).sum(-1).bound, matrix, error)

    @property
    def _square(self) -> Tensor:
        """At least B_iB_iᵀ + T_i, of a single group."""
        found = symmetric_products(self.columns, self.columns)
        error = relative_error(self.columns.shape[-1] + 4) * self._sizes.sum(-1).square()
        if self.beside is not None:
            found.add_(self.beside)
            error = error + relative_error(2) * computed_lengths(self.beside.flatten(1))
        return lift(found, error)


def no_groups(n: int, width: int) -> Groups:
    """No remainder yet."""
    none = torch.zeros(0, dtype=torch.long)
    return Groups(torch.zeros(n, width, 0, dtype=torch.float64), none, none)


def side_by_side(first: Groups, second: Groups) -> Groups:
    parts = zip(_fields(first), _fields(second), strict=True)
    columns, labels, owner = (torch.cat(pair, -1) for pair in parts)
    return Groups(columns, labels, owner)


def _fields(groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
    return groups.columns, groups.labels, groups.owner
