"""Tokens after some maps, for every input of a neighborhood (M2):

    x_i = c_i + A_i u + uᵀH_i u + Σ_g B_ig w_g + e_i,    |u| ≤ 1, |w_g| ≤ 1, |a·e_i| ≤ (aᵀQ_i a)^{1/2}.

A and H are derivatives of the first and second order, as numbers; what rounding changed in them is part of Q.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths, largest_roots
from regard._upper import Upper, relative_error, total
from regard.proofs.ball_model.ellipsoids import Sum, longest, no_shape, pushed, trace_roots, widths
from regard.proofs.ball_model.groups import Groups
from regard.proofs.ball_model.inputs import Inputs
from regard.proofs.ball_model.quadratic import Own, Quadratic, own_square, split
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
    groups: Groups
    shape: Tensor

    @property
    def tokens(self) -> int:
        return len(self.center)

    @property
    def width(self) -> int:
        return self.center.shape[-1]

    @cached_property
    def moves(self) -> Tensor:
        """A and B side by side, (n, d, k)."""
        return torch.cat([self.linear, self.groups.columns], -1)

    @cached_property
    def size(self) -> Upper:
        """At least |A_i|_F + |H_i|_F + Σ_g |B_ig|_F: what products with it are made of."""
        found = computed_lengths(self.linear.flatten(1)) + self.groups.sizes.sum(-1)
        return found if self.curved is None else found + self.curved.size

    @cached_property
    def reach(self) -> Upper:
        """At least how far each token is from its center, generously."""
        return self.size + trace_roots(self.shape)

    # Scalars a·x_i

    def first(self, directions: Tensor) -> Upper:
        """At least |a·A_i u| for directions (n or 1, d, m), (n, m)."""
        slopes = directions.mT @ self.linear
        rounding = relative_error(self.width + 4) * computed_lengths(self.linear.flatten(1)).unsqueeze(-1)
        return self.inputs.reach(slopes) + rounding * computed_lengths(directions.mT)

    @property
    def is_still(self) -> bool:
        """Whether nothing moves but by rounding: what such moves do to the second order is nothing beside
        them, so lengths are enough there.
        """
        return not self.inputs.width and not self.groups.columns.shape[-1]

    def rest(self, directions: Tensor, curved: bool = True) -> Upper:
        """At least |a·(x_i - c_i - A_i u)|, (n, m); curved=False leaves out H."""
        if self.is_still:
            return trace_roots(self.shape).unsqueeze(-1) * computed_lengths(directions.mT)
        if self.groups.columns.shape[-1] * directions.shape[-1] > TOGETHER:
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
        if self.groups.columns.shape[-1]:
            found.shape(self.groups.ellipsoid)
        if self.curved is not None:
            offset, around = split(self.curved.grams(self.own), self.own)
            found.segments(offset.unsqueeze(-1)).shape(around)
        return found.done()

    def joint_rest(self) -> Upper:
        """At least the Frobenius norm of all x_i - c_i - A_i u together."""
        apart = longest(self.rest_shape).norm()
        together = [longest(self.shape).norm()] + [
            largest_roots(piece.mT @ piece, len(piece)) for piece in self.groups.pieces()
        ]
        if self.curved is not None:
            together.append(self.curved.size.norm())
        return apart.minimum(total(together))

    # Maps

    def through(self, matrix: Tensor, center: Tensor) -> State:
        """The state after x_i ↦ M_i (x_i - c_i) + center, without the rounding, which is `lost`."""
        return replace(
            self,
            center=center,
            linear=matrix @ self.linear,
            curved=None if self.curved is None else self.curved.through(matrix),
            groups=self.groups.through(matrix),
            shape=pushed(matrix, self.shape),
        )

    def lost(self, matrix: Tensor, error: Upper | None = None) -> Upper:
        """What rounding can hide where this goes through matrices (n or 1, e, d) that are themselves off by
        `error` in norm.
        """
        sizes = relative_error(matrix.shape[-1] + 4) * computed_lengths(matrix.flatten(1)) * self.size
        return sizes if error is None else sizes + error * self.reach

    def with_rest(self, found: Sum) -> State:
        """The same with more in the ellipsoids."""
        shape = found.shape(self.shape).done()
        if (
            not bool(torch.isfinite(shape).all())
            or float(shape.diagonal(dim1=-2, dim2=-1).sum(-1).max()) > FARTHEST
        ):
            raise Refusal("its remainders leave the range of numbers on this domain; use a smaller radius")
        return replace(self, shape=shape)

    def nothing_left(self) -> State:
        """The same with empty ellipsoids."""
        return replace(self, shape=no_shape(self.tokens, self.width))
