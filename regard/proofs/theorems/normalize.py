"""Norm layers: steep where a token hardly differs from its mean, and bounded everywhere."""

from __future__ import annotations

from regard.domains import Domain, Near
from regard.maps import Normalize
from regard.norms import Norm
from regard.proofs.setting import moves_of
from regard.proofs.theorem import Bound, Theorem, checked
from regard.proofs.tokenwise import (
    largest_weight,
    least_deviation,
    length_of_moves,
    refuse_entries,
    refuse_jump,
    travel,
    with_eps,
)

THEOREM = Theorem(
    name="normalize",
    title="norm layers",
    statement=r"""
$N(x) = \gamma\,\hat x + \beta$, $\hat x = \bar x/\sqrt{s^2 + \epsilon}$, with $\bar x = x - \mathrm{mean}(x)$
(RMSNorm: $\bar x = x$) and $s = |\bar x|/\sqrt d$:
$$ |N(x) - N(x')| \le \frac{\max|\gamma|}{\sqrt{s_0^2 + \epsilon}}\,|x - x'| \quad\text{whenever } s, s' \ge
s_0,\qquad |N(x) - \beta| \le \max|\gamma|\sqrt d. $$
A token within $r$ of $x$ has $s' \ge s - r/\sqrt d$. A shell about the means of tokens bounds $s$ of both
layers from below, since $|x|^2 = |x - \mathrm{mean}|^2 + d\,\mathrm{mean}^2$; one about zero says nothing of
how far tokens are from their means.
""",
    hypotheses=("eps is positive, or no token is constant (zero, for RMSNorm)",),
    source="(ba2016), (zhang2019)",
    proof=r"""
$D\hat x = (s^2+\epsilon)^{-1/2}\big(\Pi - \bar x\bar x^\top/(d(s^2 + \epsilon))\big)$ and $0 \preceq \bar
x\bar x^\top/(d(s^2+\epsilon)) \preceq \Pi$ on the range of the projection $\Pi$. The set $\{s \ge s_0\}$ is
not convex; but $\bar x \mapsto \bar x\,h(|\bar x|)$, continued by $h(\sqrt d s_0)\,\bar x$ inside, has a
derivative of norm at most $h(\sqrt ds_0) = (s_0^2+\epsilon)^{-1/2}$ everywhere, so the constant holds for
every pair of the set. The source defines the maps.
""",
)


@THEOREM.constant(Normalize, Domain, Norm)
def normalize(map: Normalize, domain: Domain, norm: Norm) -> Bound:
    """max|γ| / √(s₀² + eps), s₀ the least deviation over the domain."""
    refuse_entries(norm, "a norm layer")
    least = least_deviation(map, domain)
    refuse_jump(map, float(least))
    value = largest_weight(map) / with_eps(map, least)
    return Bound(value, (checked(f"every token has deviation at least {float(least):.6g}"),))


@THEOREM.deviation(Normalize, Near, Norm)
def move_bound(map: Normalize, domain: Near, norm: Norm) -> Bound:
    """For each token the smaller of constant × radius and the sum of both lengths."""
    refuse_entries(norm, "a norm layer")
    return Bound(length_of_moves(domain, travel.one(map, domain.measure.points, moves_of(domain)), norm))
