"""Tokens after some maps, for every input of a neighborhood (M2):

    x_i = c_i + A_i u + uᵀH_i u + Σ_g B_ig w_g + e_i,    |u| ≤ 1, |w_g| ≤ 1, |a·e_i| ≤ (aᵀQ_i a)^{1/2}.

A and H are derivatives of the first and second order, as numbers; what rounding changed in them is part of Q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper, relative_error, total
from regard.proofs.ball_model.ellipsoids import Sum, longest, no_shape, pushed, roundest, trace_roots, widths
from regard.proofs.ball_model.groups import Groups, no_groups
from regard.proofs.ball_model.inputs import Inputs
from regard.proofs.ball_model.joint import Joint
from regard.proofs.ball_model.quadratic import Own, Quadratic, form_norms, own_square, split
from regard.proofs.ball_model.updates import Map, product_roundings, product_size
from regard.proofs.theorem import Refusal

TOGETHER = 2_000_000
"""From how many products of directions and columns on all groups are looked at as one ellipsoid."""
FARTHEST = 1e12
"""Remainders beyond it say nothing of any network."""


@dataclass(frozen=True)
class State:
    """See above; `curved` is H (n, d, d0, d0) as a `Quadratic`, None for the first order."""

    inputs: Inputs
    center: Tensor
    linear: Tensor
    curved: Quadratic | None
    groups: Groups | Joint
    shape: Tensor

    @property
    def tokens(self) -> int:
        return len(self.center)

    @property
    def width(self) -> int:
        return self.center.shape[-1]

    @property
    def columned(self) -> Groups:
        """The groups, where they have columns."""
        assert isinstance(self.groups, Groups)
        return self.groups

    @cached_property
    def has_shape(self) -> bool:
        """Whether an ellipsoid is more than a point."""
        return bool((self.shape != 0).any())

    @cached_property
    def size(self) -> Upper:
        """At least |A_i|_F + |H_i|_F + Σ_g |B_ig|_F: what products with it are made of."""
        return self._known_size + self.groups.sizes.sum(-1)

    @cached_property
    def linear_size(self) -> Upper:
        """At least |A_i|_F."""
        return computed_lengths(self.linear.flatten(1))

    @property
    def _known_size(self) -> Upper:
        return self.linear_size if self.curved is None else self.linear_size + self.curved.size

    @cached_property
    def reach(self) -> Upper:
        """At least how far each token is from its center, generously."""
        return self.size + roundest(self.shape)

    # Scalars a·x_i

    def first(self, directions: Tensor) -> Upper:
        """At least |a·A_i u| for directions (n or 1, d, m), (n, m)."""
        slopes = directions.mT @ self.linear
        rounding = relative_error(self.width + 4) * self.linear_size.unsqueeze(-1)
        return self.inputs.reach(slopes) + rounding * computed_lengths(directions.mT)

    @property
    def is_still(self) -> bool:
        """Whether nothing moves but by rounding: what such moves do to the second order is nothing beside
        them, so lengths are enough there.
        """
        return not self.inputs.width and not self.groups.shape[-1]

    def rest(self, directions: Tensor, curved: bool = True) -> Upper:
        """At least |a·(x_i - c_i - A_i u)|, (n, m); curved=False leaves out H."""
        if self.is_still:
            return roundest(self.shape).unsqueeze(-1) * computed_lengths(directions.mT)
        if self.groups.shape[-1] * directions.shape[-1] > TOGETHER:
            return widths(self.rest_shape, directions)
        found = widths(self.shape, directions) + self.groups.reach(directions)
        if self.curved is None or not curved:
            return found
        return found + self.curved.reach(directions, self.own)

    # What tokens are made of

    @cached_property
    def own(self) -> Own:
        """A_iᵀA_i."""
        return own_square(self.linear)

    @cached_property
    def rest_shape(self) -> Tensor:
        """An ellipsoid that holds x_i - c_i - A_i u, (n, d, d)."""
        found = Sum(self.tokens, self.width).shape(self.shape)
        if self.groups.shape[-1]:
            found.shape(self.groups.ellipsoid)
        if self.curved is not None:
            offset, around = split(self.curved.grams(self.own), self.own)
            found.segments(offset.unsqueeze(-1)).shape(around)
        return found.done()

    @property
    def far(self) -> float:
        """About how long all x_i - c_i - A_i u are together, but for H."""
        roots = trace_roots(self.shape).value
        if self.groups.shape[-1]:
            roots = roots + trace_roots(self.groups.ellipsoid).value
        return float(roots.norm())

    @cached_property
    def longest_rest(self) -> Upper:
        """At least the length of x_i - c_i - A_i u."""
        return longest(self.rest_shape)

    def joint_rest(self) -> Upper:
        """At least the Frobenius norm of all x_i - c_i - A_i u together."""
        apart, groups = self.longest_rest.norm(), self.groups
        if isinstance(groups, Joint):
            pieces = [groups.longest]
        else:
            pieces = [form_norms(piece) for piece in groups.pieces()]
        if not isinstance(groups, Joint) and groups.beside is not None:
            pieces = [groups.with_beside(pieces[0], longest(groups.beside).norm())]
        together = [longest(self.shape).norm(), *pieces]
        if self.curved is not None:
            together.append(self.curved.size.norm())
        return apart.minimum(total(together))

    # Maps

    def through(self, matrix: Map, center: Tensor) -> State:
        """The state after x_i ↦ M_i (x_i - c_i) + center, without the rounding, which is `lost`."""
        return replace(
            self,
            center=center,
            linear=matrix @ self.linear,
            curved=None if self.curved is None else self.curved.through(matrix),
            groups=self.groups.through(matrix),
            shape=pushed(matrix, self.shape),
        )

    def lost(self, matrix: Map, error: Upper | None = None) -> Upper:
        """What rounding can hide where this goes through matrices (n or 1, e, d) that are themselves off by
        `error` in norm.
        """
        unit = relative_error(2 * product_roundings(matrix))
        found = unit * product_size(matrix) * (self._known_size + self.groups.made_of)
        return found if error is None else found + error * self.reach

    def with_rest(self, found: Sum) -> State:
        """The same with more in the ellipsoids."""
        shape = found.shape(self.shape).done()
        trace = shape.diagonal(dim1=-2, dim2=-1).sum(-1)
        if not math.isfinite(float(shape.sum())) or float(trace.max()) > FARTHEST:
            raise Refusal("its remainders leave the range of numbers on this domain; use a smaller radius")
        return replace(self, shape=shape)

    @property
    def is_quiet(self) -> Tensor:
        """Which tokens are points, (n,)."""
        moved = (self.linear != 0).flatten(1).any(-1) | (self.shape != 0).flatten(1).any(-1)
        moved = moved | self.groups.is_moving
        return ~moved if self.curved is None else ~(moved | (self.curved.forms != 0).flatten(1).any(-1))

    def without(self, chosen: Tensor) -> State:
        """The same with points for some tokens (n,)."""
        kept = (~chosen).double()[:, None, None]
        curved = None if self.curved is None else self.curved.where(kept > 0)
        return replace(
            self,
            linear=torch.where(kept > 0, self.linear, 0.0),
            curved=curved,
            groups=self.groups.where(kept > 0),
            shape=torch.where(kept > 0, self.shape, 0.0),
        )

    def nothing_left(self) -> State:
        """The same with empty ellipsoids of single tokens, and of all together."""
        groups = no_groups(self.tokens, self.width) if isinstance(self.groups, Joint) else self.groups
        groups = groups if groups.beside is None else replace(groups, beside=None)
        return replace(self, groups=groups, shape=no_shape(self.tokens, self.width))

    def with_columns(self) -> State:
        """The same with columns for an ellipsoid of all tokens together; where it has no square root in
        numbers, with one of each token.
        """
        if not isinstance(self.groups, Joint):
            return self
        groups = self.groups.factored()
        if groups is not None:
            return replace(self, groups=groups)
        bare = replace(self, groups=no_groups(self.tokens, self.width))
        return bare.with_rest(Sum(self.tokens, self.width).shape(self.groups.own))

    def uncoupled(self) -> State:
        """The same with what is beside columns as a move of its own: |w| ≤ 1 and ν_i ≤ 1."""
        beside = self.groups.beside
        if isinstance(self.groups, Joint) or beside is None:
            return self
        bare = replace(self, groups=replace(self.groups, beside=None))
        return bare.with_rest(Sum(self.tokens, self.width).shape(beside))


def added(first: State, second: State) -> State:
    """The sum of two states of one origin; of groups of different names each has a ball of its own."""
    first, second = first.with_columns(), second.with_columns()
    if not torch.equal(first.columned.labels, second.columned.labels):
        first, second = first.uncoupled(), second.uncoupled()
    groups = first.columned.plus(second.columned)
    if first.center.shape != second.center.shape:
        raise Refusal("a sum of maps that give sequences of different shapes")
    curved = None
    if first.curved is not None and second.curved is not None:
        curved = first.curved.plus(second.curved)
    both = replace(
        second,
        center=first.center + second.center,
        linear=first.linear + second.linear,
        curved=curved,
        groups=groups,
    )
    size = computed_lengths(first.center) + computed_lengths(second.center) + first.size + second.size
    rest = Sum(*both.center.shape).shape(first.shape).ball(relative_error(4) * size)
    return both.with_rest(rest)
