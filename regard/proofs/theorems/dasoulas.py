"""The published constant of attention with LipschitzNorm."""

from __future__ import annotations

from regard._upper import exact, root
from regard.domains import Domain
from regard.lipschitz_norm import LipschitzNorm
from regard.norms import Frobenius
from regard.proofs.theorem import Bound, Theorem, checked
from regard.proofs.theorems.lipschitz_norm import projection_norm

THEOREM = Theorem(
    name="dasoulas",
    title="attention with LipschitzNorm, as published",
    statement=r"""
As many queries as keys: $$ L_F \le (e\sqrt3 + 2\sqrt6)\,\|[W_Q\;W_K\;W_V]\|. $$
""",
    hypotheses=("the map is LipschitzNorm",),
    source="(dasoulas2021)",
    proof=r"""
It is $\sqrt3$ times the second form of `lipschitz_norm`.
""",
)


@THEOREM.constant(LipschitzNorm, Domain, Frobenius)
def dasoulas(map: LipschitzNorm, domain: Domain, norm: Frobenius) -> Bound:
    """(e√3 + 2√6) |[W_Q W_K W_V]|."""
    value = (exact(1.0).exp() * root(3) + 2 * root(6)) * projection_norm(map)
    return Bound(value, (checked("the map is LipschitzNorm"),))
