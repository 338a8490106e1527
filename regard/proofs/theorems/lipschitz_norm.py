"""Attention with scores divided by the sizes of its inputs: one constant on the whole space,
in any number of tokens.
"""

from __future__ import annotations

import torch

from regard._enclosed import product_norm
from regard._upper import Upper, exact, root
from regard.domains import Domain
from regard.lipschitz_norm import LipschitzNorm
from regard.norms import Frobenius
from regard.proofs.setting import tokens_of
from regard.proofs.theorem import Bound, Theorem, checked

THEOREM = Theorem(
    name="lipschitz_norm",
    title="attention with LipschitzNorm",
    statement=r"""
$f = \mathrm{softmax}(QK^\top/\max\{uv, uw, vw\})V$, $u = \|Q\|_F$, $v = \max_j|k_j|$, $w = \max_j|v_j|$, for
$n$ tokens: $$ L_F \le \left(\sqrt{\tfrac{n}{1 + (n-1)e^{-2}}} + 2\sqrt2\right)\|[W_Q\;W_K\;W_V]\| \le (e +
2\sqrt2)\,\|[W_Q\;W_K\;W_V]\|. $$
""",
    hypotheses=("the map is LipschitzNorm",),
    source="(dasoulas2021)",
    proof=r"""
Let $c = \max\{uv, uw, vw\}$. Scores are in $[-1, 1]$, so $P_{ij} \le 1/(1 + (n-1)e^{-2})$ and $\|P\|_2^2 \le
\max_j\sum_iP_{ij}$: that is the part of $dV$. The softmax derivative takes the largest entry to the sum with
norm at most 1, so the rest is at most $w\,\|dG\|_{2,\infty}$, and $w\|dG\|_{2,\infty} \le \frac{vw}{c}\,du +
\frac{uw}{c}\,dv + \frac{uvw}{c}\frac{|dc|}{c} \le (du + dv) + \max\{du + dv, du + dw, dv + dw\}$: for $c =
uv$, $v \ge w$ and $u \ge w$ and the last term is $\frac wu du + \frac wv dv$; the other cases are alike. Both
brackets are at most $\sqrt2\,\|(dQ, dK, dV)\|_F$. Where $c = 0$ the map is continuous, and a segment can be
moved off that set, which has codimension two or more. The theorem is the authors', with $\sqrt3$ times this
constant; this one is proved here.
""",
)


@THEOREM.constant(LipschitzNorm, Domain, Frobenius)
def lipschitz_norm(map: LipschitzNorm, domain: Domain, norm: Frobenius) -> Bound:
    """(√(n/(1 + (n-1)e⁻²)) + 2√2) |[W_Q W_K W_V]|."""
    tokens = tokens_of(domain)
    two = exact(2.0)
    crowd = two.exp() if tokens is None else exact(tokens) / (1 + (tokens - 1) * two.exp_minus())
    return Bound((crowd.sqrt() + 2 * root(2)) * projection_norm(map), (checked("the map is LipschitzNorm"),))


def projection_norm(map: LipschitzNorm) -> Upper:
    """At least |[W_Q W_K W_V]|."""
    return product_norm(torch.cat([map.w_q, map.w_k, map.w_v], -1))
