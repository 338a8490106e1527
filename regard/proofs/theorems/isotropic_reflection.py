"""Reflective attention with scores t x·y: closer to one than for other tied scores."""

from __future__ import annotations

import torch

from regard._upper import Upper, exact, exact_lower, least
from regard.domains import Domain
from regard.nonexpansive import Reflected
from regard.norms import Frobenius
from regard.potentials import Bilinear, Dot, Potential
from regard.potentials.base import Scaled, Sum
from regard.proofs.rows import gibbs_balls
from regard.proofs.theorem import Bound, Theorem
from regard.proofs.theorems.reflection import HYPOTHESES, tied_head

THEOREM = Theorem(
    name="isotropic_reflection",
    title="reflective attention with scores t x·y",
    statement=r"""
$B(X) = X - cPX$ with $0 \le c \le 2$, $P$ the softmax rows of scores $t\,x\cdot y$, $t \ge 0$, tokens no
longer than $\rho$, $g = t\rho^2$:
$$ L_F \le \sup_{0\le\sigma\le1}e^{g\min(1,\,\sigma + \ell g/4)}\Big(\max\{1,\; c(1 + gq) - 1\} +
cg\sqrt\ell\varphi\Big), $$
$$ q = \min\{2\ell,\; \ell + \ell^{3/2}g + \tfrac12\ell g(1 + \varphi)^2\},\qquad \varphi = \min(1, \sigma +
\ell g), $$
with $\ell = \ell(\sigma)$ any solution of $1 \ge \ell \ge 1 - (\sigma - \ell g)_+^2$. For small $g$ it is $1
+ 2.9g$ for $c = 2$, and $1 + 1.6g$ for $c = 1.5$; `reflection` has $1 + 5g$ and $1 + 4g$.
""",
    hypotheses=(
        "softmax rows over all keys, without weights",
        "scores are a multiple of the dot product of the tokens",
        "values are the tokens",
        "tokens in a ball",
        "0 ≤ c ≤ 2",
    ),
    proof=r"""
Take $u = \sqrt t\,x$ for $x$: the map is the same with $t = 1$, and lengths are at most $\sqrt g$. Let
$K_{ij} = e^{u_i\cdot u_j}$, $D_i = \sum_jK_{ij}$, $\Delta = \mathrm{diag}(D)$, $P = \Delta^{-1}K$, $f_i =
\sum_jP_{ij}u_j$ and $C_i = \mathrm{Cov}_i(u)$. The derivative of $PX$ has the blocks $P_{ij}(I + (u_j -
f_i)u_i^\top)$, and $C_i$ more on the diagonal. With $y_{ij} = u_j - f_i$ and $u_i = y_{ji} + f_j$ it is
$\Delta^{-1}(\mathcal S + \Delta C + \mathcal R)$, $\mathcal S_{ij} = K_{ij}(I + y_{ij}y_{ji}^\top)$,
$\mathcal R_{ij} = K_{ij}y_{ij}f_j^\top$. So $B$ has the derivative $\Delta^{-1/2}(I - c(Q + \hat{\mathcal
R}))\Delta^{1/2}$ with $Q = \Delta^{-1/2}\mathcal S\Delta^{-1/2} + C$ and $\hat{\mathcal R} =
\Delta^{-1/2}\mathcal R\Delta^{-1/2}$. $\mathcal S$ is positive semidefinite: with features $\langle\Phi(u),
\Phi(v)\rangle = e^{u\cdot v}$ it is the Gram matrix of $\partial_a\Phi(u_i) - f_{i,a}\Phi(u_i)$. So $Q
\succeq 0$. Write $\mathbb{E}$ for sums with the weights $K_{ij}$, let $\mathbb{E}|d_i|^2 = 1$, $a_{ij} =
d_i\cdot y_{ij}$, and let $\lambda$ be at least the largest eigenvalue of the covariance of the tokens under
the weights $e^{x\cdot u_j}$, for every $|x| \le \sqrt g$. Then $\mathbb{E}a_{ij}^2 = \mathbb{E}d_i^\top
C_id_i \le \lambda$, and $Q[d] = \mathbb{E}[d_i\cdot d_j + a_{ij}a_{ji} + a_{ij}^2] \le 1 + 2\lambda$. Also
$\mathbb{E}d_i\cdot d_j = 1 - \delta$ with $\delta = \frac12\mathbb{E}|d_i - d_j|^2$, and
$\mathbb{E}a_{ij}a_{ji} = \mathbb{E}a_{ij}(d_j - d_i)\cdot y_{ji} + \mathbb{E}a_{ij}\,d_i\cdot y_{ji}$. The
first is at most $\sqrt\lambda(\sqrt g + F)\sqrt{2\delta}$ with $F \ge |f_j|$, and $-\delta +
\sqrt{2\lambda}(\sqrt g + F)\sqrt\delta \le \frac12\lambda(\sqrt g + F)^2$. The second is for each $i$ the
covariance $-\mathrm{Cov}_i(d_i\cdot u_j, d_i\cdot f_j)$; $f_j$ is the gradient at $u_j$ of $\phi(x) =
\log\frac1n\sum_ke^{x\cdot u_k}$, whose Hessian is that covariance and at most $\lambda$, so all $f_j$ are
within $\lambda\sqrt g$ of $\bar u = \nabla\phi(0)$: the second is at most $\sqrt\lambda\,\lambda\sqrt g$.
Together $Q \preceq 1 + \min\{2\lambda, \lambda + \lambda^{3/2}\sqrt g + \frac12\lambda(\sqrt g + F)^2\}$,
and $\|I - cQ\| \le \max\{1, c\|Q\| - 1\}$. $\hat{\mathcal R}$: $\mathbb{E}(e_i\cdot y_{ij})(f_j\cdot d_j)
\le (\mathbb{E}e_i^\top C_ie_i)^{1/2} (\mathbb{E}(f_j\cdot d_j)^2)^{1/2} \le \sqrt\lambda F$. $\Delta$: $0
\le \phi(x) - x\cdot\bar u \le \lambda g/2$, so $\sqrt{D_{\max}/D_{\min}} \le e^{\sqrt g|\bar u| + \lambda
g/4}$, and at most $e^g$, since all scores are within $g$ of zero. Let $|\bar u| = \sigma\sqrt g$ and
$\lambda = \ell g$. Under each of these weights $|\nabla\phi|^2$ and the trace of the covariance add to at
most $g$, and $|\nabla\phi| \ge |\bar u| - \lambda\sqrt g$; so $\lambda = g$ holds, and from one $\lambda$
follows the next, $g - (|\bar u| - \lambda\sqrt g)_+^2$: the smallest $\lambda = \ell_0g$ has $\eta(\ell_0)
\le 0$ with $\eta(\ell) = \ell - 1 + (\sigma - \ell g)_+^2$. $\eta$ is convex, so that for $\sigma \lt 1$,
where $\eta(0) \lt 0$, every $\ell$ with $\eta(\ell) \ge 0$ is at least $\ell_0$; for $\sigma = 1$ all tokens
are equal, and $\ell_0 = 0$. $F \le \min(\sqrt g, |\bar u| + \lambda\sqrt g)$.
The supremum over $\sigma$ is taken over intervals, with the larger end where the bound grows and the
smaller in $\ell$. The ball is convex, so the constant is the largest norm of the derivative.
""",
)

INTERVALS = 1024
"""Of the length of the mean token, from zero to the radius; a power of two, so that ends are exact."""


def _multiple_of_dot(map: Reflected, domain: Domain, norm: Frobenius) -> bool:
    return isotropic(map.attention.potential)


@THEOREM.constant(Reflected, Domain, Frobenius, about=_multiple_of_dot)
def isotropic_reflection(map: Reflected, domain: Domain, norm: Frobenius) -> Bound:
    """The supremum over the length of the mean token, the smallest over balls that hold the tokens."""
    head = tied_head(map, domain)
    values = []
    for ball, _ in gibbs_balls(head, domain):
        form = head.form(len(ball.center))
        assert form is not None
        values.append(_supremum(form.norm * ball.reach.square(), map.step))
    return Bound(least(values), HYPOTHESES)


def _supremum(g: Upper, step: float) -> Upper:
    ends = torch.arange(INTERVALS + 1, dtype=torch.float64) / INTERVALS
    low, high = exact_lower(ends[:-1]), exact(ends[1:])
    spread = exact(torch.ones(INTERVALS, dtype=torch.float64))
    for _ in range(3):
        spread = spread.minimum(1 - (low - spread * g).square())
    mean = exact(1.0).minimum(high + spread * g)
    bend = spread + spread * spread.sqrt() * g + (spread * g * (1 + mean).square()).halved()
    c = exact(float(step))
    turned = exact(1.0).maximum(c * (1 + g * bend.minimum(2 * spread)) - exact_lower(1.0))
    tilt = (g * exact(1.0).minimum(high + spread * g / 4)).exp()
    return (tilt * (turned + c * g * spread.sqrt() * mean)).amax()


def isotropic(potential: Potential) -> bool:
    """Whether scores are a multiple of x·y that is not negative, by what is declared."""
    if isinstance(potential, Scaled):
        return float(potential.factor) >= 0 and isotropic(potential.potential)
    if isinstance(potential, Sum):
        return all(isotropic(term) for term in potential.terms)
    if isinstance(potential, Bilinear):
        a = potential.a.detach().double()
        return a.ndim == 2 and a.shape[0] == a.shape[1] and torch.equal(a, a[0, 0] * torch.eye(len(a)).to(a))
    return isinstance(potential, Dot) and potential.w_q is None and potential.w_k is None
