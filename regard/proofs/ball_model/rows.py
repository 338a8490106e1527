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

from regard._upper import ELEMENTARY, Lower, Upper, exact, exact_lower
from regard.proofs.ball_model.weights import (
    beyond_linear,
    bulge,
    cubic,
    excess,
    falling_cube,
    grown,
    largest_fall,
    largest_rise,
    rising_cube,
)

GENTLE = 0.01
"""Scores that move less are bounded by fewer operations."""


@dataclass(frozen=True)
class Row:
    """Rows of laws P (…, n, n) as numbers, and of moves a = a° + r of centered scores.

    first: at least |a°|, the part that is linear in u. rest: at least |r|. mixed: at least what of r is
    neither linear nor a known quadratic. spread: at least (Σ P a°²)^{1/2}, (…, n). All are zero for keys that
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
        """At least Z - 1, (…, n, 1): Σ P (e^ā - 1 - ā), or ψ(max ā)/2 Σ P a², ψ(t) = 2(e^t - 1 - t)/t²."""
        law = Upper(self.law, self.law.shape[-1] + 4)
        each = (law * beyond_linear(self.reach)).sum(-1)
        largest = self.reach.amax(-1)
        square = (self.spread + (law * self.rest.square()).sum(-1).sqrt()).square()
        return each.minimum((curvature_ratio(largest) * square).halved()).unsqueeze(-1)

    @cached_property
    def share(self) -> Upper:
        """At least 1 - 1/Z."""
        return self.above.minimum(self.above / (1 + Lower(self.above.bound))).minimum(exact(1.0))

    @cached_property
    def _least(self) -> Lower:
        """At most P."""
        return Lower(self.law, self.law.shape[-1] + 4)

    @property
    def _is_gentle(self) -> bool:
        """Whether scores move so little that no weight grows or falls farther than its exponential."""
        return bool((self.reach.value < GENTLE).all())

    @cached_property
    def up(self) -> Upper:
        """At least E_j: where the score rises, and where it falls."""
        far = self.reach.bound
        rises = beyond_square(self.reach)
        falls = Upper((-torch.expm1(-far)).clamp_min(0.0), 20) * self.share
        if not self._is_gentle:
            rises = cubic(bulge(self._least, far, 1), far, rising_cube(far), 1)
            falls = falls.minimum(largest_fall(self.share.bound.expand_as(far), far))
        return self._second + self.rest.square().halved() + rises.maximum(falls)

    @cached_property
    def down(self) -> Upper:
        """At least -E_j."""
        far = self.reach.bound
        rises = self.reach.expm1() * self.share
        falls = self.reach.square() * self.reach / 6
        if not self._is_gentle:
            rises = rises.minimum(largest_rise(self.share.bound.expand_as(far), far))
            falls = cubic(bulge(self._least, far, -1), far, falling_cube(far), -1)
        return self._second + rises.maximum(falls)

    @property
    def _second(self) -> Upper:
        return self.mixed + self.first * self.rest

    @cached_property
    def change(self) -> Upper:
        """At least |e^a/Z - 1|: what the rest of a value's move is multiplied by."""
        more = self.reach.expm1().minimum(grown(self._least, self.reach) - exact_lower(1.0))
        less = Upper((-torch.expm1(-self.reach.bound)).clamp_min(0.0), 20) + self.share
        return more.maximum(less)

    @cached_property
    def factor(self) -> Upper:
        """At least |e^a/Z - 1 - a°|: what a value's move is multiplied by, beside a°.

        Above: with x = a° + rest it is rest + (e^x/Z - 1 - x): falling for x < 0, `excess` for x > 0.
        Below: 1 + a° - e^{a° - rest}/Z grows with a° up to rest + log Z, and is that there.
        """
        first, rest = self.first, self.rest
        high = rest + excess(self._least, self.reach)
        other = Upper(torch.exp(rest.bound - first.bound), 128)  # of a difference of at most 60
        low = (other + first) - exact_lower(1.0)
        apart = rest + self.above.log1p().expand_as(self.law)
        whole = (1 + Upper(self.above.bound)).bound
        end = Lower(torch.exp(first.bound - rest.bound) / whole, 128 + ELEMENTARY)
        ending = (1 + first) - end
        apart = apart.minimum(
            ending.map(lambda value: torch.where(first.bound <= rest.bound, value, torch.inf))
        )
        found = high.maximum(low, apart)
        capped = exact(1.0) / Lower(self.law.clamp_min(1e-290), self.law.shape[-1] + 4) + first + 1
        return found.minimum(capped)


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
