"""Reflective attention: x - c · attention(x) with tied scores is nearly an isometry where scores hardly
differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard._round import gamma, up
from regard._upper import Upper, exact, least
from regard.certificate import Hypothesis
from regard.domains import Domain, Near
from regard.lookups import Identity, Linear
from regard.nonexpansive import Reflected
from regard.normalizers import Softmax
from regard.norms import Frobenius, Norm, SequenceNorm, Wasserstein
from regard.potentials import Bilinear, Dot, Potential
from regard.potentials.base import Scaled, Sum
from regard.proofs.certification import certify, deviation
from regard.proofs.locating import one_sequence
from regard.proofs.rows import gibbs_balls
from regard.proofs.setting import crowding, tokens_of
from regard.proofs.subject import Head, subject_of
from regard.proofs.theorem import Bound, Refusal, Theorem, checked, finite
from regard.proofs.theorems.mean_value import radius_in
from regard.proofs.theorems.residual import smallest_for_couplings
from regard.supports import Full

THEOREM = Theorem(
    name="reflection",
    title="reflective attention",
    statement=r"""
$B(X) = X - cPX$ with $0 \le c \le 2$, $P$ the softmax rows of scores $x^\top Ay$ with one symmetric $A
\succeq 0$, $a = \|A\|_2$, tokens in $B(c_0, R)$ and no longer than $\rho \le |c_0| + R$, $h = aR\rho$:
$$ L_F \le e^h + c\,(h\sqrt N + aR^2),\quad N = \min\Big\{e^{a\rho^2/4},\; \frac n{1 + (n-1)e^{-2h}}\Big\}. $$
About zero all of $h$, $aR^2$ and $a\rho^2$ are $g = aR^2$. For $g \to 0$ and $c = 2$ it is the reflection at
the mean token, which keeps all lengths. In other norms, and for every attention, $x - cf(x)$ has the constant
$1 + |c|L$.
""",
    hypotheses=(
        "softmax rows over all keys, without weights",
        "scores by one symmetric positive form, without biases",
        "values are the tokens",
        "tokens in a ball",
        "0 ≤ c ≤ 2",
    ),
    proof=r"""
Let $K_{ij} = e^{x_i^\top Ax_j}$, $D_i = \sum_jK_{ij}$ and $\Delta = \mathrm{diag}(D)$, so that $P =
\Delta^{-1}K$. $K$ is positive semidefinite: its entries are $\sum_m(u_i\cdot u_j)^m/m!$ with $u =
A^{1/2}x$, and products of positive semidefinite matrices entry by entry are so (Schur). $S =
\Delta^{-1/2}K\Delta^{-1/2}$ is positive semidefinite and has the eigenvalues of $P$, which are at most one.
So $\|I - cS\| \le 1$ for $0 \le c \le 2$, and $\|I - cP\| = \|\Delta^{-1/2}(I - cS)\Delta^{1/2}\| \le
\sqrt{D_{\max}/D_{\min}}$. $\log\sum_je^{x^\top Ax_j}$ has the gradient $A\,\mathbb{E}_xx_j$, no longer than
$a\rho$, and two tokens are at most $2R$ apart: $D_{\max}/D_{\min} \le e^{2h}$.
The derivative in the direction $d$ is $(I - cP)d$ less $c$ times row by row $\mathrm{Cov}_i(x_j, x_i^\top
Ad_j) + \mathrm{Cov}_i(x_j, x_j^\top A d_i)$. The second is at most $aR^2|d_i|$, the first at most
$Ra\rho\,(\mathbb{E}_i|d_j|^2)^{1/2}$, because a law on a ball of radius $R$ has standard deviation at most
$R$ in each direction; and $\sum_i\mathbb{E}_i|d_j|^2 \le \max_j\sum_iP_{ij}\,\|d\|_F^2$. That column sum is
at most $n/(1 + (n-1)e^{-2h})$ as in `frobenius`. It is at most $e^{a\rho^2/4}$: in the coordinates $u$, let
$k(u, v) = e^{-|u - v|^2/2}$, $r_i = e^{|u_i|^2/2}$ and $\Lambda = \mathrm{diag}(r_i/\sum_lk(u_i, u_l)r_l)$.
Then $P_{ij} = e^{|u_j|^2/4}k(u_i, u_j/2)^2\Lambda_i$, and $\sum_ik(u_i, v)^2\Lambda_i \le 1$ for every $v$,
because $k$ is positive definite with $k(v, v) = 1$ and $\Lambda^{1/2}k\Lambda^{1/2}$ has no eigenvalue above
one: it is nonnegative and has the positive eigenvector $\sqrt{r_i(kr)_i}$ with eigenvalue one (Perron). The
ball is convex, so the constant is the largest norm of the derivative. The last claim is the triangle
inequality.
""",
)

INNER = "the attention"
HYPOTHESES = (
    checked("softmax rows over all keys, without weights"),
    checked("scores by one symmetric positive form, without biases"),
    checked("values are the tokens"),
    checked("every token is in a ball of finite radius"),
    checked("0 ≤ c ≤ 2"),
)


@THEOREM.constant(Reflected, Domain, Frobenius)
def reflection(map: Reflected, domain: Domain, norm: Frobenius) -> Bound:
    """e^h + c (h √N + aR²), the smallest over balls that hold the tokens."""
    head = tied_head(map, domain)
    step, values = exact(float(map.step)), []
    for ball, slopes in gibbs_balls(head, domain):
        form = head.form(len(ball.center))
        assert form is not None
        crowd = (form.norm * ball.reach.square() / 4).exp()
        if tokens_of(domain) is not None:
            crowd = crowd.minimum(crowding(head, domain, slopes.osc))
        tilt = ball.radius * slopes.alpha
        values.append(tilt.exp() + step * (tilt * crowd.sqrt() + ball.radius * slopes.kappa))
    return Bound(least(values), HYPOTHESES)


@THEOREM.constant(Reflected, Domain, Norm)
def apart(map: Reflected, domain: Domain, norm: Norm) -> Bound:
    """1 + |c| L."""
    one_sequence(map)
    part = finite(certify(map.attention, domain, norm), INNER)
    hypotheses: tuple[Hypothesis, ...] = ()
    if isinstance(norm, Wasserstein):
        part = smallest_for_couplings(map.attention, part, norm)
        hypotheses = (checked("the constant holds coupling by coupling"),)
    step = Upper(abs(float(map.step)))
    return Bound(1 + step * Upper(part.value), hypotheses, (part,), "token and attention apart")


@THEOREM.deviation(Reflected, Near, SequenceNorm)
def move_bound(map: Reflected, domain: Near, norm: SequenceNorm) -> Bound:
    """r + |c| times the deviation of the attention."""
    one_sequence(map)
    part = finite(deviation(map.attention, domain, norm), INNER)
    step = Upper(abs(float(map.step)))
    return Bound(radius_in(domain, norm) + step * Upper(part.value), parts=(part,))


def tied_head(map: Reflected, domain: Domain) -> Head:
    """The one head, with all that the theorem needs checked."""
    one_sequence(map)
    if not 0 <= map.step <= 2:
        raise Refusal(f"the step is {map.step:g}, and reflections have steps from 0 to 2; use one of these")
    head = subject_of(map.attention).separate[0]
    if not isinstance(head.normalizer, Softmax):
        raise Refusal(f"rows of {type(head.normalizer).__name__} are not Gibbs laws; use Softmax()")
    if not isinstance(head.support, Full):
        raise Refusal("with a mask the matrix of scores is not symmetric; use the support Full()")
    if isinstance(domain, Near) and domain.measure.log_weights is not None:
        raise Refusal("keys that count differently make rows that are not symmetric; give no weights")
    if not _identity_values(head):
        raise Refusal("values are not the tokens themselves; use the lookup Identity()")
    refuse_untied(head.attention.potential)
    return head


def _identity_values(head: Head) -> bool:
    if isinstance(head.lookup, Identity):
        return True
    w = head.lookup.w_v if isinstance(head.lookup, Linear) else None
    return w is not None and w.shape[0] == w.shape[1] and torch.equal(w, torch.eye(len(w), dtype=w.dtype))


def refuse_untied(potential: Potential) -> None:
    """Refuse scores that are not xᵀAy with a symmetric A ⪰ 0, by what is declared: the same projection of
    queries and keys, or a form that is proved to be positive.
    """
    if isinstance(potential, Scaled) and float(potential.factor) >= 0:
        return refuse_untied(potential.potential)
    if isinstance(potential, Sum):
        for term in potential.terms:
            refuse_untied(term)
        return None
    if isinstance(potential, Dot):
        return _refuse_dot(potential)
    if isinstance(potential, Bilinear):
        a = potential.a.detach().double()
        if a.shape[-2] != a.shape[-1] or not torch.equal(a, a.mT) or not positive_definite(a):
            raise Refusal(
                "the form of the scores is not seen to be symmetric and positive; use Dot() with w_q = w_k"
            )
        return None
    raise Refusal(f"{type(potential).__name__} is not one tied bilinear form; use Dot() with w_q = w_k")


def _refuse_dot(potential: Dot) -> None:
    pair = potential.w_q, potential.w_k
    tied = all(w is None for w in pair) or (
        pair[0] is not None and pair[1] is not None and torch.equal(pair[0], pair[1])
    )
    if not tied:
        raise Refusal("queries and keys have different projections; give w_q = w_k, so that scores are tied")
    if any(b is not None and bool((b != 0).any()) for b in (potential.b_q, potential.b_k)):
        raise Refusal("queries or keys have a bias, so that scores are not symmetric; leave b_q and b_k out")
    if not float(potential.factor(1)) >= 0:
        raise Refusal("the scale of the scores is negative; give one that is not")


def positive_definite(a: Tensor) -> bool:
    """Whether a symmetric matrix is proved to be positive definite: a Cholesky factorization of A - sI that
    runs to its end proves A - sI ⪰ -c, c = γ(k+2)/(1-γ(k+2)) · tr(A) (rump2006); s is above all roundings.
    """
    if not bool(torch.isfinite(a).all()) or not bool((a.diagonal() > 0).all()):
        return False
    trace, size = up(float(a.diagonal().sum()) * (1 + gamma(len(a)))), len(a)
    shift = 8 * gamma(size + 2) * trace
    shifted = a - shift * torch.eye(size, dtype=torch.float64)
    return int(torch.linalg.cholesky_ex(shifted)[1]) == 0
