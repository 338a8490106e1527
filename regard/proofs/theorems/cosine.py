"""Cosine scores: they are bounded everywhere, and steep only near the origin."""

from __future__ import annotations

from torch import Tensor

from regard._enclosed import length, lengths_below, product_norm
from regard._upper import Upper, exact, exact_lower, least, relative_error
from regard.domains import Domain, Whole
from regard.normalizers import Softmax
from regard.norms import Frobenius, TokenMax
from regard.potentials import Cosine
from regard.proofs.about import all_of, rows_by, scores_by
from regard.proofs.rows import gibbs_balls
from regard.proofs.scores import FACTOR, BallFacts, Slopes
from regard.proofs.setting import crowding
from regard.proofs.subject import Head
from regard.proofs.terms import moving_term
from regard.proofs.theorem import Bound, Refusal, Theorem, checked

THEOREM = Theorem(
    name="cosine",
    title="cosine attention on a ball",
    statement=r"""
Scores $\tau\,\hat q_i\cdot\hat k_j$, $\hat z = z/\sqrt{|z|^2 + \varepsilon}$, tokens in $B(c, R)$. On the
ball projected queries have lengths in $[\ell_q, \rho_q]$, keys in $[\ell_k, \rho_k]$. With
$\lambda = \|W\|/\sqrt{\ell^2 + \varepsilon}$, $\hat\rho = \rho/\sqrt{\rho^2 + \varepsilon} \le 1$ for either,
$\alpha = \tau\hat\rho_q\lambda_k$, $\kappa = \tau\lambda_q\min(\hat\rho_k, \lambda_kR)$,
$\mathrm{osc} = 2\tau\hat\rho_q\min(\hat\rho_k, \lambda_kR)$ and $N$ of `frobenius`:
$$ L_\infty \le w(1 + R\alpha + R\kappa),\qquad L_F \le w(\sqrt N(1 + R\alpha) + R\kappa). $$
Far from the origin it is smaller than $w(1 + R\tau(\|W_K\| + \|W_Q\|)/\sqrt\varepsilon)$ by the factor
$\ell/\sqrt\varepsilon$.
""",
    hypotheses=("softmax rows of a cosine score", "values affine in the tokens", "tokens in a ball"),
    source="(qi2023, 3.2)",
    proof=r"""
The derivative of $\hat z$ has norm $1/\sqrt{|z|^2 + \varepsilon}$. The image of the ball under a projection
is in a ball, which is convex, so $\hat k$ and $\hat q$ have slopes $\lambda$, $|\hat q| \le \hat\rho_q$,
and the $\hat k_j$ lie in a ball of radius $\min(\hat\rho_k, \lambda_kR)$. Then
$(Df[D])_i = W^\top\{\mathbb{E}_id + \tau\mathbb{E}_i[y\,\hat q_i\cdot D\hat k_j[d_j]] + \tau\mathrm{Cov}_i(x,
\hat k)D\hat q_i[d_i]\}$, and standard deviations of tokens are at most $R$.
The scores are the authors'; their constant is for values that are normalized too, the one here is proved
here.
""",
)


COSINE = all_of(rows_by(Softmax), scores_by(Cosine))


@THEOREM.constant(Head, Domain, TokenMax, about=COSINE)
def cosine_token_max(head: Head, domain: Domain, norm: TokenMax) -> Bound:
    """w (1 + Rα + Rκ), the smallest over balls that hold the tokens."""
    found = [
        head.w * (1 + ball.radius * (steep.alpha + steep.kappa))
        for ball, steep in _cosine_balls(head, domain)
    ]
    return Bound(
        least(found),
        (checked("softmax rows of a cosine score"), checked("every token is in a ball of finite radius")),
    )


@THEOREM.constant(Head, Domain, Frobenius, about=COSINE)
def cosine_frobenius(head: Head, domain: Domain, norm: Frobenius) -> Bound:
    """w (√N (1 + Rα) + Rκ), the smallest over balls that hold the tokens."""
    found = []
    for ball, steep in _cosine_balls(head, domain):
        crowd = crowding(head, domain, steep.osc).sqrt()
        found.append(head.w * (crowd * (1 + ball.radius * steep.alpha) + ball.radius * steep.kappa))
    hypotheses = (
        checked("softmax rows of a cosine score"),
        checked("every token is in a ball of finite radius"),
        checked("the number of tokens"),
    )
    return Bound(least(found), hypotheses)


def _cosine_balls(head: Head, domain: Domain) -> list[tuple[BallFacts, Slopes]]:
    term, factor = moving_term(head.potential)
    assert isinstance(term, Cosine)
    if isinstance(domain, Whole):
        raise Refusal(
            "cosine scores are bounded for all tokens, but linear values are not; normalize the values "
            "too, or use Ball(radius)"
        )
    return [(ball, cosine_slopes(term, factor, ball)) for ball, _ in gibbs_balls(head, domain)]


def cosine_slopes(potential: Cosine, factor: float, ball: BallFacts) -> Slopes:
    """α, κ and the oscillation of a cosine score on a ball."""
    tau = Upper(abs(float(potential.scale) * factor), FACTOR)
    slope_q, size_q = normalized_bounds(potential.w_q, potential.b_q, ball, potential.eps)
    slope_k, size_k = normalized_bounds(potential.w_k, potential.b_k, ball, potential.eps)
    around = size_k.minimum(slope_k * ball.radius)
    alpha, kappa = tau * size_q * slope_k, tau * slope_q * around
    return Slopes(alpha, alpha, kappa, tau * slope_q * size_k, 2 * tau * size_q * around, alpha)


def normalized_bounds(
    weight: Tensor | None, bias: Tensor | None, ball: BallFacts, eps: float
) -> tuple[Upper, Upper]:
    """Bounds of the slope of x ↦ ẑ and of |ẑ| on the ball, z = wᵀx + b: ẑ is steepest where z is nearest to
    zero, and |ẑ| grows with |z|.
    """
    norm = product_norm(weight)
    center = ball.center if weight is None else ball.center @ weight.double()
    center = center if bias is None else center + bias.double()
    size = length(ball.center) if weight is None else (1 + length(weight)) * length(ball.center)
    size = size if bias is None else size + length(bias.expand(len(center)))
    spread = norm * ball.radius + relative_error(4 * len(ball.center) + 8) * size
    nearest, farthest = lengths_below(center) - spread, float(length(center) + spread)
    most = exact(farthest) / (exact_lower(farthest).square() + exact_lower(eps)).sqrt()
    return norm / (nearest.square() + exact_lower(eps)).sqrt(), most.minimum(exact(1.0))
