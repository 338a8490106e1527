"""Remainders that several tokens share: Σ_g B_ig w_g with |w_g| ≤ 1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper, relative_error, root
from regard.proofs.ball_model.ellipsoids import SMALLEST, Sum, lifted, pushed, trace_roots, turned
from regard.proofs.ball_model.updates import (
    Map,
    lower_products,
    product_size,
    symmetric_products,
    whole_of,
)

_NUMBERS = itertools.count()


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
        if self._index[0] == 1:
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

    def reach(self, directions: Tensor) -> Upper:
        """At least Σ_g |B_igᵀa| for directions (n or 1, d, m), (n, m)."""
        rounding = relative_error(self.shape[1] + 4) * self._sizes.sum(-1).unsqueeze(-1)
        return self.lengths(directions.mT @ self.columns) + rounding * computed_lengths(directions.mT)

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
        return self.merged_into(Sum(*self.shape[:2])).done()

    @property
    def known_ellipsoid(self) -> Tensor | None:
        """At least B_iB_iᵀ, where that was made, of a single group."""
        return self.__dict__.get("ellipsoid") if self._index[0] == 1 else None

    def with_ellipsoid(self, shape: Tensor) -> Groups:
        """The same, with an ellipsoid that is known."""
        self.__dict__["ellipsoid"] = shape
        return self

    def through(self, matrix: Map) -> Groups:
        """Their images; an ellipsoid that was made goes with them, and holds the rounded columns too: they
        are off by 2γ |M|_F `made_of`, and |B|_F² ≤ tr Q.
        """
        after = self._put_off(matrix) if self._is_many else self.replaced(matrix @ self.columns)
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

    def plus(self, other: Groups) -> Groups:
        """The sum; columns of one name add."""
        if len(self.labels) == len(other.labels) and bool((other.labels == self.labels).all()):
            return other.replaced(other.columns + self.columns)
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
        return _side_by_side(other.replaced(joined), self.of(~shared))

    def of(self, chosen: Tensor) -> Groups:
        """Some of the columns."""
        return Groups(self.columns[..., chosen], self.labels[chosen], self.owner[chosen])

    def pieces(self) -> Iterator[Tensor]:
        """The matrix of each group, all tokens together, (n d, columns)."""
        count, index = self._index
        return (self.columns[..., index == group].flatten(0, 1) for group in range(count))

    def merged_into(self, found: Sum) -> Sum:
        """Each group as an ellipsoid of the sum."""
        if not self.shape[-1]:
            return found
        weight = self._sizes.value.clamp_min(SMALLEST)
        size = Upper(self._sizes.value.square() / weight, 2 * self._sizes.roundings + 3).sum(-1)
        error = relative_error(self.columns.shape[-1] + 8) * size
        if self._index[0] == 1:
            matrix = symmetric_products(self.columns, self.columns) / weight.unsqueeze(-1)
        else:
            matrix = (self.columns / weight[:, self._index[1]].unsqueeze(1)) @ self.columns.mT
        return found.add(Upper(weight).sum(-1).bound, matrix, error)


def no_groups(n: int, width: int) -> Groups:
    """No remainder yet."""
    none = torch.zeros(0, dtype=torch.long)
    return Groups(torch.zeros(n, width, 0, dtype=torch.float64), none, none)


def _side_by_side(first: Groups, second: Groups) -> Groups:
    parts = zip(_fields(first), _fields(second), strict=True)
    columns, labels, owner = (torch.cat(pair, -1) for pair in parts)
    return Groups(columns, labels, owner)


def _fields(groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
    return groups.columns, groups.labels, groups.owner


def opened(groups: Groups, shape: Tensor, most: int) -> tuple[Groups, Tensor]:
    """Ellipsoids (n, d, d) as groups that other tokens may share, and what is left of them: of all columns,
    old and new, the `most` longest stay groups.

    With Π = VVᵀ, e = Πe + (I - Π)e. Vᵀe lies in the ellipsoid of VᵀQV, which is no more than diag(λ) + δ.
    """
    n, width = shape.shape[:2]
    values, vectors = torch.linalg.eigh(shape)
    energy = torch.cat([groups.energy, values.clamp_min(0.0).flatten()])
    kept = torch.zeros(len(energy), dtype=torch.bool)
    kept[energy.argsort(descending=True)[:most]] = True
    old, new = kept[: len(groups.labels)], kept[len(groups.labels) :].unflatten(0, (n, width))
    basis = vectors * new.unsqueeze(-2)
    inner = basis.mT @ shape @ basis
    unit = relative_error(2 * width + 4) * width
    off = computed_lengths((inner - torch.diag_embed(values * new)).flatten(1)) + unit * computed_lengths(
        shape.flatten(1)
    )
    lengths = (Upper(values.clamp_min(0.0), 1) + off.unsqueeze(-1)).sqrt().bound
    fresh = _fresh(basis * lengths.unsqueeze(-2), new)
    left = Sum(n, width).shape(pushed(torch.eye(width, dtype=torch.float64) - basis @ basis.mT, shape))
    rounding = relative_error(width + 8) * width * computed_lengths(shape.flatten(1)).sqrt()
    left.ball(rounding + relative_error(4) * computed_lengths(lengths))
    groups.of(~old).merged_into(left)
    return _side_by_side(groups.of(old), fresh), left.done()


def joined(groups: Groups, shape: Tensor) -> Groups | None:
    """All groups and the ellipsoids (n, d, d) of single tokens as one group, None where it has no square
    root in numbers.

    As sets of moves of all tokens together their sum is in the ellipsoid of G = (Σ s)(Σ B_gB_gᵀ/s_g + Σ
    Q_i/s_i) (M1), and G + 2δ ≥ LLᵀ ≥ G for the Cholesky factor L of G + δ, which is backward stable.
    """
    n, width = shape.shape[:2]
    size = n * width
    flat = groups.columns.flatten(0, 1)
    lengths = computed_lengths(groups._sizes.bound.mT).bound.clamp_min(SMALLEST)
    traces = trace_roots(shape).bound.clamp_min(SMALLEST)
    weight = Upper(torch.cat([lengths, traces])).sum(-1)
    whole = weight.square()  # at least the trace of G
    scale = weight.bound / lengths
    known = groups.known_ellipsoid
    factor = float(scale) if len(scale) == 1 else 1.0
    left = flat if len(scale) == 1 else flat * scale[groups._index[1]]
    gram = lower_products(left, flat, width, known is None, factor)
    own = shape * (weight.bound / traces)[:, None, None]
    own = own if known is None else own + factor * known
    for i, part in enumerate(own):
        gram[i * width : (i + 1) * width, i * width : (i + 1) * width] += part
    shift = (relative_error(8 * size + 2 * flat.shape[-1] + 128) * whole).bound
    gram.diagonal().add_(shift)
    root, failed = torch.linalg.cholesky_ex(gram)
    lost = relative_error(4 * size + 16) * computed_lengths(root.flatten()).square()
    lost = lost + relative_error(flat.shape[-1] + 32) * whole
    if int(failed) or not float(lost) <= float(shift) < math.inf:
        return None
    blocks = torch.stack([gram[i : i + width, i : i + width] for i in range(0, size, width)])
    around = lifted(blocks, Upper(shift) + relative_error(8) * whole)
    return _one_group(root.unflatten(0, (n, width))).with_ellipsoid(around)  # a triangle of blocks


def _one_group(columns: Tensor) -> Groups:
    """These columns (n, d, n d), which are a triangle of blocks, with fresh names."""
    count, name = columns.shape[-1], next(_NUMBERS)
    labels = torch.tensor([next(_NUMBERS) for _ in range(count)], dtype=torch.long)
    filled = tuple((i + 1) * columns.shape[1] for i in range(len(columns)))
    return Groups(columns, labels, torch.full((count,), name), filled=filled)


def closed(groups: Groups, shape: Tensor, most: int) -> tuple[Groups, Tensor]:
    """The `most` longest columns, and ellipsoids with all others."""
    if len(groups.labels) <= most:
        return groups, shape
    kept = torch.zeros(len(groups.labels), dtype=torch.bool)
    kept[groups.energy.argsort(descending=True)[:most]] = True
    return groups.of(kept), groups.of(~kept).merged_into(Sum(*shape.shape[:2]).shape(shape)).done()


def _fresh(roots: Tensor, kept: Tensor) -> Groups:
    """The kept columns of each token (n, d, d) as a group of its own."""
    n, width = roots.shape[:2]
    token, column = kept.nonzero().unbind(-1)
    columns = torch.zeros(n, width, len(token), dtype=torch.float64)
    columns[token, :, torch.arange(len(token))] = roots[token, :, column]
    names = [next(_NUMBERS) for _ in range(n)]
    owner = torch.tensor(names)[token]
    labels = torch.tensor([next(_NUMBERS) for _ in range(len(token))], dtype=torch.long)
    return Groups(columns, labels, owner)
