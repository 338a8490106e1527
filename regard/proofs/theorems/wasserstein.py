"""Self-attention as a map of measures, in Wasserstein distances: no number of tokens at all."""

from __future__ import annotations

import math

from regard.domains import Domain, Near, TokenSet
from regard.norms import Wasserstein
from regard.proofs.locating import enclosing
from regard.proofs.rows import gibbs_balls
from regard.proofs.setting import equivariant
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem, checked

THEOREM = Theorem(
    name="wasserstein",
    title="self-attention as a map of measures",
    statement=r"""
For laws of tokens on $B(c, R)$ and $T_\mu(x) = W^\top\!\int y\,\Psi_{G(x,\cdot)}(\mu)(dy)$, with the slopes
of `token_max` and $q = \sqrt{1 + 2R\nu + R^2\alpha^2}$:
$$ W_\infty: w(q + R\kappa),\qquad W_2: w(e^{\mathrm{osc}/2}q + R\kappa),\qquad W_p: w(e^{\mathrm{osc}}(1 +
2R\alpha) + R\kappa). $$ For laws near a given sequence, on a ball that holds it. All hold coupling by
coupling: for every coupling $(X, Y)$ of $\mu$ and $\nu$ $\|T_\mu(X) - T_\nu(Y)\|_{L^p} \le L\,\|X -
Y\|_{L^p}$, so residual connections add one and sums add.
""",
    hypotheses=("softmax rows", "values affine in the tokens", "tokens in a ball", "no masks, no positions"),
    source="(vuckovic2021)",
    proof=r"""
Take any coupling of $\mu$ and $\nu$, move $X_t = (1-t)X + tY$ along it and differentiate $t \mapsto
T_{\mu_t}(X_t)$: the row bound of `token_max` holds with integrals for sums. $\int \mathbb{E}_x|d|^2\,\mu(dx)
\le \sup_y\int (dP_x/d\mu)(y)\,\mu(dx)\,\|d\|^2 \le e^{\mathrm{osc}}\|d\|^2$ gives $W_2$, $\sup|d|$ gives
$W_\infty$. $W_p$, every $p \ge 1$: for every coupling $|T_\mu(X) - T_\nu(Y)| \le |T_\mu(X) - T_\mu(Y)| +
|T_\mu(Y) - T_\nu(Y)| \le \mathrm{Lip}(T_\mu)\,|X - Y| + \sup_x|T_\mu(x) - T_\nu(x)|$ almost surely.
$\mathrm{Lip}(T_\mu) \le wR\kappa$, a covariance of values and query slopes. The second term is one number, at
most $we^{\mathrm{osc}}(1 + 2R\alpha)\,W_1(\mu, \nu)$: for a unit vector $e$ and $c = e\cdot T_\nu(x)$,
$e\cdot T_\mu(x) - c = (\mu - \nu)(g)/\mu(G_x)$ with $g(y) = G_x(y)(e\cdot W^\top y - c)$, whose slope is at
most $wG_{\max}(1 + 2R\alpha)$ since $|e\cdot W^\top y - c| \le 2wR$, and $\mu(G_x) \ge G_{\min}$. Then
$W_1(\mu, \nu) \le \mathbb{E}|X - Y| \le \|X - Y\|_{L^p}$ for this very coupling, and Minkowski's inequality
adds both terms. The theorem is the authors'; the constants are proved here.
""",
)


@THEOREM.constant(Head, Near, Wasserstein)
def near(head: Head, domain: Near, norm: Wasserstein) -> Bound:
    """The same on a ball that holds the neighborhood."""
    return wasserstein(head, enclosing(domain), norm)


@THEOREM.constant(Head, TokenSet, Wasserstein)
def wasserstein(head: Head, domain: Domain, norm: Wasserstein) -> Bound:
    """The bound of the order p: without exponential for ∞, with half of it for 2."""
    equivariant(head, domain)
    ((ball, slopes),) = gibbs_balls(head, domain)
    own = ball.radius * slopes.kappa
    spread = (1 + 2 * ball.radius * slopes.nu + (ball.radius * slopes.alpha).square()).sqrt()
    any_order = slopes.osc.exp() * (1 + 2 * ball.radius * slopes.alpha)
    crowd = spread if math.isinf(norm.p) else any_order
    crowd = crowd.minimum(slopes.osc.halved().exp() * spread) if norm.p == 2 else crowd
    return Bound(
        head.w * (crowd + own),
        (
            checked("softmax rows"),
            checked("every token is in a ball of finite radius"),
            checked("no masks and no positions"),
        ),
    )
