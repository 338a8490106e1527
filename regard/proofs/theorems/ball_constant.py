"""The constant of heads on a neighborhood of a real input: its exact value at the center,
and what can change.
"""

from __future__ import annotations

from typing import Any

from regard._upper import exact
from regard.certificate import round_up
from regard.domains import Near, Neighborhood
from regard.norms import Frobenius, TokenMax
from regard.proofs.near.facts import local_facts
from regard.proofs.near.steepness import row_constants
from regard.proofs.setting import moves_of
from regard.proofs.subject import MultiHead
from regard.proofs.theorem import Bound, Theorem, assumed, checked

THEOREM = Theorem(
    name="ball_constant",
    title="softmax attention near a given input",
    statement=r"""
On $\|X' - X\|_F \le r$, with $\eta = P'/P - 1$ the relative change of a row law and $\chi$ a bound of
$\|\eta\|_{L^2(P)}$: $$ L_F \le \min\{\|J(X)\|_2 + T_a + T_b + T_c + T_d,\; \text{direct}\}, $$
$T_a$ for $(E'-E)[V^\top d]$, $T_b$ for $\mathrm{Cov}'(z, s_E) - \mathrm{Cov}(z, s_E)$, $T_c, T_d$ for what
values and slopes drift. In TokenMax norm, row by row with $|d_k| \le \rho_k$, the difference of covariances
is $\int \kappa_t(z, s_E, \zeta)\,dt$ over the laws $P_t \propto Pe^{t\zeta}$, at most $\int
\mathrm{sd}_t(z)\,2M\,\mathrm{sd}_t(s_E)\,dt$ with $2M$ the range of the change $\zeta$ of the scores.
""",
    hypotheses=(
        "softmax rows",
        "scores bilinear in pairs of tokens (dot products, rotary positions, any fixed bias)",
        "values affine in the tokens",
    ),
    proof=r"""
$J_i(X')E = E'[V^\top e] + \mathrm{Cov}'(z + V^\top d,\; s_E + e_i^\top A d + d_i^\top A e)$. Subtract
$J_i(X)E$. $\mathrm{Cov}'(z, s_E) - \mathrm{Cov}(z, s_E) = E[\eta z s_E] - E[\eta z]E[\eta s_E]$;
Cauchy–Schwarz in $L^2(P)$, in $L^2(P')$ and in $\ell^2$ over rows. $\chi \le \sinh M$ by Kantorovich's
inequality $E e^{2\zeta}/(E e^\zeta)^2 \le \cosh^2 M$, and $\chi \le s\sigma/(1 + b\sigma^2)$ with $\sigma =
\mathrm{sd}(\zeta)$, $|e^x - 1| \le s|x|$ and $e^x - 1 - x \ge bx^2$ for $|x| \le \omega$. Under any law on
points, the deviation in any direction is at most half their diameter (Popoviciu). $\mathrm{diag}P' -
P'P'^\top$ is the Laplacian of a graph with weights $P'_kP'_l$, so it is at most $\mathrm{diag}\,2P'(1-P')$,
beside at most $\mathrm{diag}P'$ and $\frac12 I$. $\|\eta z\|_{L^2(P)}$ is at most $s\|\zeta z\| + (Z -
1)\|z\|$, part by part of $\zeta$. Heads are combined as in `heads`, the Jacobian at the center is that of all
heads together.
""",
)


@THEOREM.constant(MultiHead, Near, Frobenius)
def frobenius(subject: Any, domain: Near, norm: Frobenius) -> Bound:
    """min(|J| + change, direct) on the Frobenius ball that holds the neighborhood."""
    facts = local_facts(subject, domain)
    radius = _radius(domain)
    hypotheses = [checked("softmax rows"), checked("scores bilinear in pairs of tokens"), _arithmetic()]
    if facts.ball.probability < 1:
        hypotheses.append(
            assumed("the random start of the norm at the center is drawn once, independently of the data")
        )
    return Bound(
        facts.ball.constant(radius),
        tuple(hypotheses),
        note=f"|J| at the center ≤ {round_up(float(facts.ball.norm))}",
        probability=facts.ball.probability,
    )


@THEOREM.constant(MultiHead, Near, TokenMax)
def token_max(subject: Any, domain: Near, norm: TokenMax) -> Bound:
    """The largest of the rows' constants."""
    facts = local_facts(subject, domain)
    rows = row_constants(facts.heads, facts.linear, facts.rows(moves_of(domain)).scores)
    hypotheses = (checked("softmax rows"), checked("scores bilinear in pairs of tokens"), _arithmetic())
    return Bound(rows.amax(), hypotheses)


def _radius(domain: Near) -> float:
    if isinstance(domain, Neighborhood) and isinstance(domain.norm, Frobenius):
        return float(domain.radius)
    return float(exact(moves_of(domain)).norm())


def _arithmetic() -> Any:
    return assumed(
        "float64: exp and log are right to 8 units in the last place, eigenvalues as LAPACK's analysis says"
    )
