"""A row of softmax weights whose scores move (M7).

With P the row at the center and a_j the moves of its scores about their mean under P, Z = Σ P e^a is at
least 1, and Σ_j P_j (e^{a_j}/Z - 1) y_j with Σ P y = 0 is, beyond a_j and a_j°²/2, Σ_j P_j y_j E_j with
-down ≤ E_j ≤ up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._upper import Lower, Upper, exact, exact_lower


@dataclass(frozen=True)
class Row:
    """Rows of laws P (n, n) as numbers, and of moves a = a° + r of centered scores.

    first: at least |a°|, the part that is linear in u. rest: at least |r|. mixed: at least what of r is
    neither linear nor a known quadratic. spread: at least (Σ P a°²)^{1/2}, (n,). All are zero for keys that
    a row does not see.
    """

    law: Tensor
    first: Upper
    rest: Upper
    mixed: Upper
    spread: Upper

    @cached_property
    def reach(self) -> Upper:
        """At least |a|."""
        return self.first + self.rest

    @cached_property
    def above(self) -> Upper:
        """At least Z - 1, (n, 1): Σ P (e^ā - 1 - ā), or ψ(max ā)/2 Σ P a², with ψ(t) = 2(e^t - 1 - t)/t²."""
        law = Upper(self.law, len(self.law) + 4)
        each = (law * beyond_linear(self.reach)).sum(-1)
        largest = self.reach.amax(-1)
        square = (self.spread + (law * self.rest.square()).sum(-1).sqrt()).square()
        return each.minimum((curvature_ratio(largest) * square).halved()).unsqueeze(-1)

    @cached_property
    def share(self) -> Upper:
        """At least 1 - 1/Z."""
        return self.above.minimum(self.above / (1 + Lower(self.above.bound))).minimum(exact(1.0))

    @cached_property
    def up(self) -> Upper:
        """At least E_j."""
        falling = (-torch.expm1(-self.reach.bound)).clamp_min(0.0)
        low = Upper(falling, 20) * self.share
        return self._second + self.rest.square().halved() + beyond_square(self.reach).maximum(low)

    @cached_property
    def down(self) -> Upper:
        """At least -E_j."""
        cube = self.reach.square() * self.reach / 6
        return self._second + (self.reach.expm1() * self.share).maximum(cube)

    @property
    def _second(self) -> Upper:
        return self.mixed + self.first * self.rest

    @cached_property
    def factor(self) -> Upper:
        """At least |e^a/Z - 1 - a°|: what a value's move is multiplied by, beside a°."""
        first, rest = self.first, self.rest
        high = (first + rest).expm1() - Lower(first.bound)
        other = Upper(torch.exp(rest.bound - first.bound), 128)  # of a difference of at most 60
        low = (other + first) - exact_lower(1.0)
        found = high.maximum(low, rest + self.above.log1p().expand_as(self.law))
        capped = exact(1.0) / Lower(self.law.clamp_min(1e-290), len(self.law) + 4) + first + 1
        return found.minimum(capped)


def beyond_linear(t: Upper) -> Upper:
    """At least e^t - 1 - t; t² e^t/2 where that has more digits."""
    small = t.square().halved() * t.exp()
    return small.minimum(t.expm1() - Lower(t.bound))


def beyond_square(t: Upper) -> Upper:
    """At least e^t - 1 - t - t²/2; t³ e^t/6 where that has more digits."""
    small = t.square() * t / 6 * t.exp()
    number = t.bound
    less = Lower(number) + Lower(number).square().halved()
    return small.minimum(t.expm1() - less)


def curvature_ratio(t: Upper) -> Upper:
    """At least ψ(t) = 2(e^t - 1 - t)/t², which is at most e^t."""
    number = t.bound.clamp_min(1e-3)
    exactly = 2 * (Upper(number).expm1() - Lower(number)) / Lower(number).square()
    return t.exp().minimum(exactly.map(lambda value: torch.where(t.bound < 1e-3, torch.inf, value)))
