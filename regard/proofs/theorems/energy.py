"""Self-attention where every row sees every key alike: no key is crowded by more than the energy of the
scores allows, however many tokens there are.
"""

from __future__ import annotations

import math

import torch

from regard._round import EPS
from regard._upper import Upper, least
from regard.domains import Domain, Near, TokenSet
from regard.normalizers import Softmax
from regard.norms import Frobenius, TokenSum, Wasserstein
from regard.proofs.about import rows_by
from regard.proofs.crowd import Crowd, crowd, log_ratio
from regard.proofs.locating import enclosing
from regard.proofs.rows import gibbs_balls
from regard.proofs.scores import BallFacts, Slopes
from regard.proofs.setting import crowding, equivariant, tokens_of
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem, checked

THEOREM = Theorem(
    name="energy",
    title="softmax attention by the energy of its scores",
    statement=r"""
Every row sees every key by the same scores $s(x, y)$; tokens in $B(c, R)$, with $w, \alpha, \nu, \kappa$ of
`token_max`, $h = R\alpha$ and $q = \sqrt{1 + 2R\nu + h^2}$. For a law $\mu$ of tokens $F(\mu, y) =
\int\mu(dx)\,e^{s(x, y)}/\mu(e^{s(x, \cdot)})$; for $n$ tokens it is the sum of a column of the attention
matrix. With $\Lambda \ge \sup F$ and $\theta = \max(0, 2/p - 1)$, for $1 \le p < \infty$ $$ L_{W_p} \le
w\left(\Lambda^{1/p}(1 + 2h)^\theta q^{1-\theta} + R\kappa\right). $$ $p = 2$ is the constant in Frobenius
norm, $p = 1$ that in TokenSum norm. And $$ \log F(\mu, y) \le \sup_\pi\iint\pi(dx)\pi(dz)\,(s(x, y) - s(x,
z)) \le \mathrm{osc}, $$ whose middle is, for scores $x^\top Ay + \beta\cdot y$ with $b = A^\top c + \beta$,
$$ E = \max_{|m|, |y| \le R}(A^\top m + b)\cdot(y - m). $$ For $b = 0$, with $S = (A + A^\top)/2$, $E =
R^2\min_{t>0}\left(t/2 + \lambda_{\max}(AA^\top/2t - S)_+\right)$, and $g = \|A\|R^2$: $g/4$ for positive $A$
(tied projections), $g$ for skew $A$, $2g$ for $A = -aI$, always between $g/4$ and $2g$. Tied Gaussian scores
$-t|x - y|^2/2$ with keys in $k$ dimensions: $\Lambda = \min(e^{tR^2/2}, (4/3)^{k/2})$ and $L_{W_1} \le
w(\Lambda + 2R\min(\alpha\Lambda, \sqrt{\Lambda t\,(4/3)^{k/2} 4k/3}) + R\kappa)$. Tied Laplace scores of
numbers: $\Lambda = 5/4$. Tied cosine scores: $e^{t/4}$. All hold coupling by coupling, so residual
connections add one and sums add.
""",
    hypotheses=(
        "softmax rows",
        "values affine in the tokens",
        "tokens in a ball",
        "no masks, no positions",
    ),
    source="(vuckovic2021)",
    proof=r"""
**The crowd.** Let $u(x) = \log\mu(e^{s(x, \cdot)})$. By Gibbs' variational formula $\log F =
\sup_\pi\{\pi(s(\cdot, y)) - \pi(u) - \mathrm{KL}(\pi|\mu)\}$, over laws $\pi \ll \mu$, and by the same
formula, with the same $\pi$, $u(x) \ge \pi(s(x, \cdot)) - \mathrm{KL}(\pi|\mu)$. Both divergences cancel:
$\log F \le \sup_\pi\iint \pi(dx)\pi(dz)(s(x, y) - s(x, z))$. A difference of scores of one row is at most
$\mathrm{osc}$.

**Bilinear scores.** Write $x = c + x'$. Up to what is constant in a row, $s = (A^\top x' + b)\cdot y'$, and
the double integral is $(A^\top m + b)\cdot(y' - m)$ with $m$ the mean of $\pi$, a point of the ball. It is
nearly attained: $\mu \to \delta_{c + m}$. For any $\lambda, \tau, \sigma \ge 0$ and $z = (m/R, y'/R, 1)$ the
value is a quadratic form $z^\top Nz$, so $\mathrm{diag}(\lambda I, \tau I, \sigma) - N \succeq -\delta I$
gives $E \le \lambda + \tau + \sigma + 3\delta$; that is what is certified. Eliminating $y'$ with $\tau =
R^2t/2$ gives $(A^\top m + b)\cdot y' \le R^2t/2 + |A^\top m + b|^2/2t$ and the closed form; two quadratic
constraints lose nothing (the S-lemma). Positive $A$: $t = \|A\|/2$, $AA^\top/\|A\| \preceq A$. Always $E \ge
g/4$: $m = Ru/2, y' = Rv$ with $u, v$ a pair of top singular vectors, $u^\top Av = \|A\|$, gives $g/2 -
R^2u^\top Au/4 \ge g/4$ without $b$, and with the other sign of both the part of $b$ changes its sign.

**Positive definite kernels** $G = e^s$, symmetric, with the Hilbert space $H$. Let $\varphi \in H$ and $\rho
= \mu\varphi/G\mu$, where $G\mu(x) = \mu(e^{s(x,\cdot)})$. Then $I = \int\varphi^2/G\mu\,d\mu =
\int\varphi\,d\rho = \langle\varphi, G\rho\rangle_H \le \|\varphi\|_H\,\langle\rho, G\rho\rangle^{1/2}$, and
$\langle\rho, G\rho\rangle \le I$ by $ab \le (a^2 + b^2)/2$ and symmetry. So $I \le \|\varphi\|_H^2$. For
$\varphi = G(\cdot, y)^{1/2}$ this is $F \le \|G(\cdot, y)^{1/2}\|_H^2$. Gaussian, $t = 1$, on
$\mathbb{R}^k$: $\hat G = (2\pi)^{k/2}e^{-|\xi|^2/2}$, $\hat\varphi = (4\pi)^{k/2}e^{-|\xi|^2}$,
$\|\varphi\|_H^2 = (2\pi)^{-k}\int|\hat\varphi|^2/\hat G = (4/3)^{k/2}$, no matter where keys are. With
$\varphi_l(x) = (x - y)_lG(x, y)^{1/2}$, $\hat\varphi_l = i\partial_l\hat\varphi$, and
$\sum_l\|\varphi_l\|_H^2 = (4/3)^{k/2}\,4k/3$, which bounds $\int\mu(dx)\,|x - y|^2e^{s(x, y)}/G\mu(x)$. On a
ball the double integral is $t(V - |m - y|^2)/2$ with $V = \pi(|x - m|^2) \le R^2$: $e^{tR^2/2}$. Laplace on
$\mathbb{R}$ with bandwidth 1: $\|f\|_H^2 = \frac12\int(f^2 + f'^2)$, which is $5/4$ for $e^{-|x|/2}$. Tied
cosine scores are dot products $t\, m\cdot(y - m) \le t/4$ of points of the unit ball. Tied projections are
scores of the projected tokens.

**The constant.** As for `wasserstein`, take any coupling, $X_t = (1-t)X + tY$, and differentiate
$T_{\mu_t}(X_t)$: with $P_x$ the row of $x$, $m_x$ its mean, $d$ the direction, the derivative is
$\mathbb{E}_x[W^\top(I + (y - m_x)v^\top)d(y)] + W^\top\mathrm{Cov}_x(y, z)\,d(x)$, and the last term is at
most $wR\kappa|d(x)|$. For a unit vector $a$ let $M(y) = Wa + (a\cdot W^\top(y - m_x))v$; the first term in
direction $a$ is $\mathbb{E}_x[M\cdot d]$. `token_max` proves $\mathbb{E}_x|M|^2 \le w^2q^2$, and $|y - m_x|
\le 2R$ gives $|M| \le w(1 + 2h)$. Let $1/p + 1/p' = 1$. If $p' \ge 2$, $(\mathbb{E}_x|M|^{p'})^{1/p'} \le
\sup|M|^{1 - 2/p'}(\mathbb{E}_x|M|^2)^{1/p'} \le w(1 + 2h)^\theta q^{1-\theta}$; if $p' \le 2$, it is at most
$(\mathbb{E}_x|M|^2)^{1/2} \le wq$. By Hölder the first term is at most this times
$(\mathbb{E}_x|d|^p)^{1/p}$, and $\int\mu(dx)\,\mathbb{E}_x|d|^p = \int\mu(dy)|d(y)|^pF(\mu, y) \le
\Lambda\|d\|_p^p$. Minkowski adds the two terms. Or by Schur's test: $|M| \le w(1 + |v|\,|y - m_x|)$, whose
row integral is at most $w(1 + h)$ and whose column integral, $\int\mu(dx)\,e^{s(x, y)}/\mu(e^{s(x,
\cdot)})\, |M|$, is at most $wC$, $C = \Lambda + 2R\min(\alpha\Lambda, \sqrt{\Lambda J})$ with $J \ge
\int\mu(dx)\,e^{s(x, y)}/\mu(e^{s(x, \cdot)})\,|v|^2$ (Cauchy–Schwarz): the first term is at most $wC^{1/p}(1
+ h)^{1-1/p}\|d\|_p$.

**Sequences** are uniform laws: $\|X\|_F = \sqrt n\,\|X\|_{L^2(\mu)}$, and a factor of both sides does not
count. Keys that count $w_j$ times while rows count once: $\sum_iP_{ij} \le \max_i(w_j/w_i)\,F(\mu, x_j)$.
$\Lambda$ may also be the $N$ of `frobenius`. The theorem on measures is the source's; the constants are
proved here.
""",
)

ALIKE = "this theorem is about rows that all see all keys"


@THEOREM.constant(Head, Domain, Frobenius, about=rows_by(Softmax))
def frobenius(head: Head, domain: Domain, norm: Frobenius) -> Bound:
    """The constant of p = 2."""
    return _of_sequences(head, domain, 2.0)


@THEOREM.constant(Head, Domain, TokenSum, about=rows_by(Softmax))
def token_sum(head: Head, domain: Domain, norm: TokenSum) -> Bound:
    """The constant of p = 1."""
    return _of_sequences(head, domain, 1.0)


def _finite_order(head: Head, domain: Domain, norm: Wasserstein) -> bool:
    return isinstance(head.normalizer, Softmax) and math.isfinite(norm.p)


@THEOREM.constant(Head, Near, Wasserstein, about=_finite_order)
def near(head: Head, domain: Near, norm: Wasserstein) -> Bound:
    """The same on a ball that holds the neighborhood."""
    return wasserstein(head, enclosing(domain), norm)


@THEOREM.constant(Head, TokenSet, Wasserstein, about=_finite_order)
def wasserstein(head: Head, domain: Domain, norm: Wasserstein) -> Bound:
    """The constant of the order p."""
    equivariant(head, domain)
    values = []
    for ball, slopes in gibbs_balls(head, domain):
        found = crowd(head.potential, ball, slopes.osc)
        values.append(_constant(head, ball, slopes, found, norm.p))
    return _bound(values)


def _of_sequences(head: Head, domain: Domain, p: float) -> Bound:
    """Where the number of tokens is given, it bounds a column too, and better than osc does."""
    equivariant(head, domain, ALIKE)
    values = []
    for ball, slopes in gibbs_balls(head, domain):
        known = slopes.osc
        if tokens_of(domain) is not None:
            known = crowding(head, domain, slopes.osc).grow(torch.log)
        found = crowd(head.potential, ball, known).weighted(log_ratio(domain))
        values.append(_constant(head, ball, slopes, Crowd(found.energy.minimum(known), found.steepness), p))
    return _bound(values)


def _constant(head: Head, ball: BallFacts, slopes: Slopes, crowd: Crowd, p: float) -> Upper:
    """w (min{Λ^{1/p} (1 + 2h)^θ q^{1-θ}, C^{1/p} (1 + h)^{1-1/p}} + Rκ)."""
    radius, alpha = ball.radius, slopes.alpha
    h = radius * alpha
    q = (1 + 2 * radius * slopes.nu + h.square()).sqrt()
    factor = crowd.energy.exp()
    column = factor + 2 * radius * (alpha * factor).minimum((factor * crowd.steepness).sqrt())
    far, rest = max(0.0, 2 / p - 1), min(1.0, 2 - 2 / p)
    by_rows = _power(factor, 1 / p) * _power(1 + 2 * h, far) * _power(q, rest)
    by_columns = _power(column, 1 / p) * _power(1 + h, 1 - 1 / p)
    return head.w * (by_rows.minimum(by_columns) + radius * slopes.kappa)


def _power(base: Upper, exponent: float) -> Upper:
    """base^exponent, for a base of at least one and an exponent in [0, 1] that was computed within 2⁻⁵³ of
    the true one: with 2⁻⁵² added it is not less, whatever the sum was rounded to.
    """
    return base.grow(lambda value: value.pow(exponent + EPS))


def _bound(values: list[Upper]) -> Bound:
    return Bound(
        least(values),
        (
            checked("softmax rows"),
            checked("every token is in a ball of finite radius"),
            checked("no masks and no positions"),
        ),
    )
