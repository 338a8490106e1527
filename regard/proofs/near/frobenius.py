"""All tokens together move by at most r, |x' - x|_F ≤ r: how far the scores of a head can move.

Sums over rows are taken in ℓ².
"""

from __future__ import annotations

from functools import cached_property

import torch

from regard._enclosed import Vectors, largest_roots
from regard._upper import Upper, exact, root
from regard.proofs.near.enclosure import Enclosure
from regard.proofs.near.head import LocalHead, LocalValues
from regard.proofs.near.laws import Laws


class FrobeniusScores(Enclosure):
    """Bounds of ζ for Σ_k |d_k|² ≤ r²."""

    def __init__(self, local: LocalHead, radius: float) -> None:
        n, law, rest = local.n, local.law, local.rest
        self.r = exact(radius)
        eye = torch.eye(n, dtype=torch.bool)
        self.off = law.where(~eye)
        alpha = local.alpha.where(~eye)
        self.alpha = alpha
        # (N3) ω_k = r (|own_k|² + Σ_{l≠i} (1{k=l} - P_l)² α_l²)^{1/2} + a r² (c + (c² + Σ_{l≠i} (1{k=l} -
        # P_l)²)^{1/2})/2, c = |1{k=i} - P_i|
        keys = (law * alpha).square().sums_of_others() + (rest * alpha).square()
        apart = self.off.square().sums_of_others() + rest.square().where(~eye)
        mine, others = (
            part.map(lambda value: value.diagonal().unsqueeze(-1).expand(n, n)) for part in (rest, law)
        )
        close = mine.where(eye) + others.where(~eye)
        bend = local.a * self.r.square()
        reach = (
            self.r * (local.own_size.square() + keys).sqrt()
            + bend * (close + (close.square() + apart).sqrt()).halved()
        )
        # (N4)  as for radii, with |d_i|² + |d_k|² + |d_l|² ≤ r²; p(p + q) ≤ (1 + √2)/2 for p² + q² ≤ 1
        each = alpha.square()
        both = local.seen.unsqueeze(-1) & local.seen.unsqueeze(-2) & ~eye
        linear = (local.own_apart.square() + each.unsqueeze(-1) + each.unsqueeze(-2)).sqrt()
        climb = (self.r * linear + bend * (1 + root(2)).halved()).where(both).amax(-1)
        # (N5)  sd ζ ≤ r (sd(own)² + max_{k≠i} P_k α_k²)^{1/2} + a r² max_k P_k^{1/2}
        most = (self.off * alpha.square()).amax(-1)
        deviation = self.r * (local.own_spread.square() + most).sqrt() + bend * law.amax(-1).sqrt()
        super().__init__(
            local, Laws(local, reach.where(local.seen), climb, climb.amax(-1).halved()), deviation
        )

    @cached_property
    def apart(self) -> Upper:
        """At least √λ_max(diag P' - P'P'ᵀ): the deviation of vectors whose lengths are one together."""
        return self.laws.high.amax(-1).sqrt().minimum(root(0.5))

    @cached_property
    def split(self) -> Upper:
        """Q with diag P' - P'P'ᵀ ≤ diag Q in every row: P' itself, or 2P'(1 - P') since the left is a graph's
        Laplacian.

        2t(1 - t) is largest on [low, high] at the point nearest to one half.
        """
        high, low = self.laws.high.bound, self.laws.low.bound
        nearest = torch.minimum(torch.maximum(torch.full_like(high, 0.5), low), high)
        halved = Upper(2 * nearest * (1 - nearest), 3)
        smaller = (halved.value.amax(-1) < high.amax(-1)).unsqueeze(-1)
        return halved.where(smaller) + exact(high).where(~smaller)

    @cached_property
    def slopes(self) -> Vectors:
        """v_ij in fewer coordinates, (n, 1 or n, c)."""
        return self.local.by_key.narrow()

    def by_keys(self, factors: Upper, weights: Upper) -> Upper:
        """max_j λ_max(Σ_i b_i² Q_ij v_ij v_ijᵀ)^{1/2}:
        at least (Σ_i b_i² Σ_j Q_ij (v_ij·d_j)²)^{1/2} for |d|_F ≤ 1 (N27).
        """
        roots = (factors.square().unsqueeze(-1) * weights).sqrt()
        scaled = roots.value.unsqueeze(-1) * self.slopes.center
        grams = scaled.permute(1, 2, 0) @ scaled.permute(1, 0, 2)
        found = largest_roots(grams, self.local.n)
        rounding = roots.map(lambda value: value.mT).norm().amax() * self.slopes.error
        return Upper(found.value, found.roundings + roots.roundings + 1).amax() + rounding

    def gather(self, factors: Upper) -> Upper:
        """At least the ℓ² length of rows that are bounded by b_i sd_i(ζ) (N28)."""
        local = self.local
        own = (factors * local.own_spread).amax()
        linear = own + self.by_keys(factors, self.off)
        return self.r * linear + local.a * self.r.square() * symmetric_root(
            factors.square().unsqueeze(-1) * local.law
        )

    @cached_property
    def law_change(self) -> Upper:
        """At least |P' - P|_F."""
        return self.gather(self.local.law.amax(-1).sqrt() * self.steep)

    @cached_property
    def column(self) -> Upper:
        """(max_j Σ_i P_ij)^{1/2}."""
        return self.local.law.sum(0).amax().sqrt()

    @cached_property
    def high_column(self) -> Upper:
        """(max_j Σ_i P'_ij)^{1/2}."""
        return self.laws.high.sum(0).amax().sqrt()

    @cached_property
    def query_spread(self) -> Upper:
        """At least the deviation of c = ∂s/∂x_i under every law, beside what tokens move."""
        return self.local.query_centered.spreads(self.laws.high).minimum(self.local.query_half)

    def value_spread(self, values: LocalValues) -> Upper:
        """At least the deviation of Vᵀx under every law, beside what tokens move."""
        return values.z.spreads(self.laws.high).minimum(values.half)


def symmetric_root(matrix: Upper) -> Upper:
    """max_ij ((M_ij + M_ji)/2)^{1/2}: at least (Σ_i t_i Σ_j M_ij t_j)^{1/2} for t on the simplex."""
    return (matrix + matrix.map(lambda value: value.mT)).halved().amax().sqrt()
