"""How far heads move when every token moves within a radius of its own."""

from __future__ import annotations

from typing import Any

from regard._upper import Upper
from regard.domains import Near
from regard.norms import Frobenius, SequenceNorm
from regard.proofs.near.facts import local_facts
from regard.proofs.near.taylor import norm_of_rows
from regard.proofs.setting import moves_of
from regard.proofs.subject import MultiHead
from regard.proofs.theorem import Bound, Refusal, Theorem, checked
from regard.proofs.theorems.ball_constant import _arithmetic

THEOREM = Theorem(
    name="remainder",
    title="the move of every row, from its exact remainder",
    statement=r"""
Token $k$ moves by $|d_k| \le \rho_k$. Row $i$ of the heads moves by at most $\min\{\mathrm{lin}_i +
\mathrm{rem}_i,\ \mathrm{sat}_i\}$ with $$ \mathrm{lin}_i = \min_{\lambda > 0, \sum\lambda =
1}\lambda_{\max}\Big(\sum_j \rho_j^2 J_{ij}J_{ij}^\top/\lambda_j\Big)^{1/2},\qquad \mathrm{rem}_i =
|(E'-E)[V^\top d]| + |\mathrm{Cov}(z, q)| + \Big|\int_0^1 (1-t)\,\kappa_t(z,\zeta,\zeta)\,dt\Big|, $$ $\zeta$
the centered change of scores, $q$ its quadratic part, $\kappa_t$ the third cumulant under $P_t \propto
Pe^{t\zeta}$; and $\mathrm{sat}_i$ the largest
$|E'[z + V^\top d]|$ over laws $P'$ between their bounds. $\mathrm{lin}_i$ is within $\sqrt{\pi/2}$ of the
largest linear move.
""",
    hypotheses=(
        "softmax rows",
        "scores bilinear in pairs of tokens (dot products, rotary positions, any fixed bias)",
        "values affine in the tokens",
    ),
    proof=r"""
$u' - u - Du[d] = (E'-E)[V^\top d] + E[zq] + \{(E'-E)[z] - \mathrm{Cov}(z,\zeta)\}$, and the bracket is
Taylor's remainder of $t \mapsto E_t[z]$, whose second derivative is
$\kappa_t(z,\zeta,\zeta) \le \mathrm{sd}_t(z)\,\mathrm{sd}_t((\zeta - E_t\zeta)^2)$. For a variable of range
$2M$ the last factor is at most $M^2$ (and at most $2M\sigma$): with $x \in [-A, B]$ centered,
$A + B = 2M$, $r = (A-B)/2$, $(x+A)(x-B)(x-r)^2 \le 0$ gives $Ex^4 \le (3r^2+AB)\sigma^2 + ABr^2$, so
$\mathrm{Var}(x^2) \le (2r^2+M^2)\sigma^2 + (M^2-r^2)r^2 - \sigma^4 \le M^4$.
Alternatively $e^\zeta = 1 + \zeta + \varphi_2(\zeta)$ gives $(E[z\varphi_2(\zeta)] - \varepsilon
E[z\zeta])/Z$ with $Z = Ee^\zeta = 1 + \varepsilon \ge 1$; the smaller is used.
Every part $g_a$, of every head and the linear one, has $g_a\cdot e \le (e^\top G_ae)^{1/2}$ with $G_a$ a
covariance, $V^\top V$ or a multiple of the identity, so all together are at most
$\lambda_{\max}(\sum_aG_a/\lambda_a)^{1/2}$ for any shares $\lambda_a$ with sum one. When laws are saturated,
$|y + g|^2 \le \mu + y^\top(I - D/\mu)^{-1}y$ for $g$ in the ellipsoid $D$ of the moved values and $\mu >
\lambda_{\max}(D)$, $y = \sum_hE'_hz$, the form by pairs of heads.
$\mathrm{lin}$: Cauchy–Schwarz on $\sum_j\rho_j|J_{ij}^\top e|$. Weights: $P'_k/(1-P'_k)$ changes by at most
$e^{\max_l\zeta_k-\zeta_l}$ and by at most $e^{\zeta_k/(1-P_k)}$ (Jensen).
""",
)


@THEOREM.deviation(MultiHead, Near, SequenceNorm)
def remainder(subject: Any, domain: Near, norm: SequenceNorm) -> Bound:
    """The norm of the bounds of all rows."""
    if alone(subject, domain, norm):
        raise Refusal("where tokens are wide and one moves, the theorem for one moving token stands in")
    rows = row_deviations(subject, domain)
    return Bound(
        norm_of_rows(norm, rows),
        (checked("softmax rows"), checked("scores bilinear in pairs of tokens"), _arithmetic()),
    )


def alone(subject: Any, domain: Near, norm: SequenceNorm) -> bool:
    """Whether one token of many wide ones moves: then bounds of all rows cost much,
    and those of `one_token` are made for it.
    """
    return (
        isinstance(norm, Frobenius)
        and int((moves_of(domain) > 0).sum()) == 1
        and local_facts(subject, domain).large
    )


def row_deviations(subject: Any, domain: Near) -> Upper:
    """At least |F_i(x') - F_i(x)| for each row (n,)."""
    return local_facts(subject, domain).rows(moves_of(domain)).best
