"""The published constant of dot-product self-attention on a ball, in Frobenius norm."""

from __future__ import annotations

import math

from regard._round import outward
from regard.certify.rows import gibbs_balls
from regard.certify.setting import pair_bias, tokens_of, width_of
from regard.certify.subject import Head
from regard.certify.theorem import Bound, Refusal, Theorem, checked
from regard.domains import Domain
from regard.norms import Frobenius

THEOREM = Theorem(
    name="castin_general",
    title="dot-product attention on a ball, as published",
    statement=r"""
Scores $x_i^\top A x_j$, tokens with $|x_i| \le R$, $g = \|A\|R^2$: $$ L_F \le \sqrt3\,\|W\|\left(g^2(4n + 1) + n\right)^{1/2}. $$
""",
    hypotheses=(
        "softmax rows",
        "scores are one bilinear form without query bias",
        "tokens in a ball about 0",
        "the number of tokens is given",
    ),
    source="(castin2024, general bound)",
    proof=r"""
It is never below `frobenius`: $(\sqrt{n(1+g^2)} + g)^2 \le 2(n + ng^2 + g^2) \le 3(n + 4ng^2 + g^2)$, and $N \le n$ there for every mask
and every fixed bias.
""",
)


@THEOREM.constant(Head, Domain, Frobenius)
def castin_general(head: Head, domain: Domain, norm: Frobenius) -> Bound:
    """√3 |W| (g² (4n + 1) + n)^½."""
    g, tokens = pull_on_ball(head, domain), tokens_of(domain)
    if tokens is None:
        raise Refusal("the bound grows with the number of tokens; say how many there are, e.g. Ball(radius, tokens=n)")
    pair_bias(head, domain)  # rows that see nothing are refused
    value = outward(math.sqrt(3) * head.w * math.sqrt(g * g * (4 * tokens + 1) + tokens))
    hypotheses = (
        checked("softmax rows"),
        checked("scores are one bilinear form without query bias"),
        checked("every token is in a ball about 0"),
    )
    return Bound(value, (*hypotheses, checked("the number of tokens")))


def pull_on_ball(head: Head, domain: Domain) -> float:
    """g = |A| R² on the smallest ball about 0 that holds the tokens."""
    if not head.softmax:
        raise Refusal("")
    form = head.form(head.width(width_of(domain)))
    if form is None:
        raise Refusal("it was published for scores that are one bilinear form xᵀAy")
    if bool((form.beta != 0).any()):
        raise Refusal("it was published without query biases")
    return outward(form.norm * min(ball.reach for ball, _ in gibbs_balls(head, domain)) ** 2)
