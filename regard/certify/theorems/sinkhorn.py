"""Doubly stochastic attention in Frobenius norm."""

from __future__ import annotations

import math

from regard._round import gamma, outward, product_norm_bound
from regard.certify.rows import bounded_balls
from regard.certify.scores import BallFacts, Slopes
from regard.certify.setting import moves_of, tokens_of
from regard.certify.subject import Head
from regard.certify.theorem import Bound, Refusal, Theorem, assumed, checked
from regard.domains import Domain, Near, Neighborhood
from regard.normalizers import Sinkhorn
from regard.norms import Frobenius

THEOREM = Theorem(
    name="sinkhorn",
    title="Sinkhorn attention in Frobenius norm",
    statement=r"""
$P$ doubly stochastic of the scores $x_i^\top A x_j$, plus anything that depends on $i$ alone or on $j$ alone, tokens in $B(c, R)$, $X_c$
the tokens minus $c$:
$$ L_F \le w\left(1 + \|A\|\sup\|X_c\|_2^2\right) \le w\left(1 + n\|A\|R^2\right), $$
and $w(1 + \tfrac12nR(\alpha + \kappa))$ for scores with the slopes of `token_max`.
""",
    hypotheses=("the iteration has converged: rows and columns sum to one", "equal weights and no mask", "tokens in a bounded convex set"),
    source="(sander2022)",
    proof=r"""
$P$ maximizes $\langle P, S\rangle - \sum P\log P$ over doubly stochastic matrices. On directions whose rows sum to zero the entropy of
each row has modulus 2, as for softmax, so $\|dP\|_F \le \frac12\|dS\|_F$.
$\|P\|_2 = 1$. Terms of the score that depend on $i$ alone or on $j$ alone do not change $P$, so the score is $r_i^\top A r_j$ with
$r = x - c$, and $\|dS\|_F \le 2\|A\|\|X_c\|_2\|D\|_F$.
$\|dP\,X_c\|_F \le \|dP\|_F\|X_c\|_2$. For other scores $\|dS\|_F \le \sqrt n(\alpha + \kappa)\|D\|_F$ up to terms of $i$ alone. The map is
the authors'; the constant is proved here.
""",
)


@THEOREM.constant(Head, Domain, Frobenius)
def sinkhorn(head: Head, domain: Domain, norm: Frobenius) -> Bound:
    """w (1 + |A| sup|X_c|₂²), the smallest over balls that hold the tokens."""
    tokens = _doubly_stochastic(head, domain)
    values = [_constant(head, domain, tokens, ball, steep) for ball, steep in bounded_balls(head, domain)]
    hypotheses = (assumed("the iteration has converged: rows and columns sum to one"), checked("equal weights and no mask"))
    return Bound(min(values), (*hypotheses, checked("every token is in a ball of finite radius"), checked("the number of tokens")))


def _constant(head: Head, domain: Domain, tokens: int, ball: BallFacts, steep: Slopes) -> float:
    size, form = _size(domain, tokens, ball), head.form(len(ball.center))
    change = 0.5 * math.sqrt(tokens) * (steep.alpha + steep.kappa) if form is None else form.norm * size
    return outward(head.w * (1 + change * size))


def _size(domain: Domain, tokens: int, ball: BallFacts) -> float:
    """At least |X_c|₂ for all sequences of the domain."""
    largest = outward(math.sqrt(tokens) * ball.radius)
    if not isinstance(domain, Near):
        return largest
    points = domain.measure.points - ball.center
    rounding = gamma(4) * largest
    frobenius = isinstance(domain, Neighborhood) and isinstance(domain.norm, Frobenius)
    moved = float(moves_of(domain).max()) if frobenius else float(moves_of(domain).norm())
    return min(largest, outward(product_norm_bound(points) + rounding + moved))


def _doubly_stochastic(head: Head, domain: Domain) -> int:
    """How many tokens there are, or a sentence about what is missing."""
    if not isinstance(head.normalizer, Sinkhorn):
        raise Refusal("")
    if type(head.support).__name__ != "Full":
        raise Refusal("Sinkhorn rows under a mask have no theorem; use the full support")
    if isinstance(domain, Near) and domain.measure.log_weights is not None:
        raise Refusal("Sinkhorn rows of tokens with weights have no theorem; use equal weights")
    tokens = tokens_of(domain)
    if tokens is None:
        raise Refusal("the bound grows with the number of tokens; say how many there are, e.g. Ball(radius, tokens=n)")
    return tokens
