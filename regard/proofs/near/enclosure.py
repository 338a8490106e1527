"""How far the scores of one head can move over a neighborhood: one set of facts, for any shape of it.

When tokens move by d, the scores of row i change, up to a constant in the row, by the centered

    ζ_k = own_k·d_i + Σ_{l≠i} (1{k=l} - P_l) v_l·d_l + d_iᵀ(A_k d_k - E A d),      (N1)
    E ζ = 0,      P' = P e^ζ/Z,      Z = E e^ζ ≥ 1.

A neighborhood gives bounds of ζ: ω_k ≥ |ζ_k| and κ_k ≥ max_l ζ_k - ζ_l (in `laws`), σ ≥ sd ζ (`deviation`).
The rest follows here.
"""

from __future__ import annotations

from abc import ABC
from functools import cached_property

import torch

from regard._upper import Lower, Upper, exact, exact_lower
from regard.proofs.near.exponential import steepness, tail, tail_over_square
from regard.proofs.near.head import LocalHead
from regard.proofs.near.laws import Laws


class Enclosure(ABC):  # noqa: B024 (its kinds differ in how they are made)
    """Bounds of the change of scores of one head, for each row.

    Abstract: `TokenRadii` and `FrobeniusBall` are its kinds.
    """

    def __init__(self, local: LocalHead, laws: Laws, deviation: Upper) -> None:
        self.local, self.laws = local, laws
        self.deviation = deviation.minimum(laws.reach.amax(-1), laws.half)

    @property
    def reach(self) -> Upper:
        """ω_k ≥ |ζ_k|."""
        return self.laws.reach

    @property
    def half(self) -> Upper:
        """M, half of at least the largest ζ_k - ζ_l."""
        return self.laws.half

    @cached_property
    def top(self) -> Upper:
        """ω* = max_k ω_k."""
        return self.reach.amax(-1)

    @cached_property
    def steep(self) -> Upper:
        """(e^ω* - 1)/ω*: |e^ζ - 1| ≤ steep |ζ|."""
        return steepness(self.top)

    @cached_property
    def excess(self) -> Upper:
        """ε ≥ Z - 1 = E φ₂(ζ): key by key, or by σ² φ₂(ω*)/ω*² (N10)."""
        each = (self.local.law * tail(self.reach, 2)).sum(-1)
        return each.minimum(self.deviation.square() * tail_over_square(self.top, 2))

    @cached_property
    def relative(self) -> Upper:
        """χ ≥ |P'/P - 1| in L²(P) (N11).

        From the bounds of P'; steep σ, since Var(e^ζ)/Z² bounds its square, over 1 + bow σ² ≤ Z; √(e^ω* - 1),
        since E(P'/P)² ≤ max P'/P; and sinh M, since E e^{2ζ}/(E e^ζ)² ≤ cosh² M (Kantorovich).
        """
        squares = (self.laws.change.square() / self.local.law_low).where(self.local.seen)
        boxed = squares.sum(-1).sqrt()
        return boxed.minimum(
            self.steep * self.deviation, self._by_deviation, self.top.expm1().sqrt(), self.half.sinh()
        )

    @cached_property
    def _by_deviation(self) -> Upper:
        """sup of steep σ/(1 + bow σ²) over all σ up to the deviation: it grows until σ = 1/√bow,
        where it is steep/(2√bow).
        """
        bow, at = self.bow, self.deviation.bound
        there = self.steep * exact(at) / (1 + bow * exact_lower(at).square())
        peak = self.steep / (2 * bow.sqrt())
        grows = at.square() * bow.value < 0.99
        return Upper(torch.where(grows, there.value, peak.value), max(there.roundings, peak.roundings))

    @cached_property
    def bow(self) -> Lower:
        """At most (eˣ - 1 - x)/x² for all x ≥ -ω*: it grows with x.

        The difference loses up to 32/ω* roundings, ω* ≥ 10⁻³.
        """
        at = self.top.bound.clamp_min(1e-3)
        return Lower((torch.expm1(-at) + at) / at.square(), 40_000).minimum(exact_lower(0.4995))

    @cached_property
    def swap(self) -> Upper:
        """At least Σ_k |P'_k - P_k|: twice the total variation, at most 2 tanh(M/2) (N12)."""
        return 2 * self.half.halved().tanh()

    @cached_property
    def ratio(self) -> Upper:
        """At least max_k |P'_k/P_k - 1|: from the bounds of P', or e^ω* - 1.

        The latter also where weights shrink: Z ≤ cosh ω, and e^{-ω}/cosh ω ≥ 2 - e^ω is t(t - 1)² ≥ 0 for t =
        e^ω.
        """
        each = (self.laws.change / self.local.law_low).where(self.local.seen)
        return each.amax(-1).minimum(self.top.expm1())

    def total_change(self, values: Upper) -> Upper:
        """At least Σ_k |P'_k - P_k| f_k for f ≥ 0: by the largest f, by Cauchy–Schwarz,
        or by the mass that can be carried.
        """
        wide = values.expand_as(self.reach.value).where(self.local.seen)
        by_square = self.relative * (self.local.law * wide.square()).sum(-1).sqrt()
        return (self.swap * wide.amax(-1)).minimum(by_square, self.laws.total_change(wide))
