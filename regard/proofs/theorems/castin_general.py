"""The published constant of dot-product self-attention on a ball, in Frobenius norm."""

from __future__ import annotations

import torch

from regard._enclosed import length
from regard._upper import Upper, exact, exact_lower, root
from regard.domains import Domain
from regard.normalizers import Softmax
from regard.norms import Frobenius
from regard.proofs.about import rows_by
from regard.proofs.rows import gibbs_balls
from regard.proofs.setting import pair_bias, tokens_of, width_of
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Refusal, Theorem, checked

THEOREM = Theorem(
    name="castin_general",
    title="dot-product attention on a ball, as published",
    statement=r"""
Scores $x_i^\top A x_j$, tokens with $|x_i| \le R$, $g = \|A\|R^2$: $$ L_F \le \sqrt3\,\|W\|\left(g^2(4n + 1)
+ n\right)^{1/2}. $$ With a query bias, $x_i^\top Ax_j + \beta\cdot x_j$: the same with $g =
\min_{c>0}\sqrt{\|A\|^2 + |\beta|^2/c^2}\,(R^2 + c^2)$.
""",
    hypotheses=(
        "softmax rows",
        "scores are one bilinear form",
        "tokens in a ball about 0",
        "the number of tokens is given",
    ),
    source="(castin2024, general bound)",
    proof=r"""
It is never below `frobenius`: $(\sqrt{n(1+g^2)} + g)^2 \le 2(n + ng^2 + g^2) \le 3(n + 4ng^2 + g^2)$, and $N
\le n$ there for every mask and every fixed bias. A query bias is the published bound for tokens $(x_i, c)$
with a constant coordinate: the form $(A; \beta^\top/c)$ has norm at most $\sqrt{\|A\|^2 + |\beta|^2/c^2}$,
these tokens lie in the ball of radius $\sqrt{R^2 + c^2}$, and sequences that keep the coordinate are some of
all sequences there.
""",
)


@THEOREM.constant(Head, Domain, Frobenius, about=rows_by(Softmax))
def castin_general(head: Head, domain: Domain, norm: Frobenius) -> Bound:
    """√3 |W| (g² (4n + 1) + n)^½."""
    g, tokens = pull_on_ball(head, domain), tokens_of(domain)
    if tokens is None:
        raise Refusal(
            "the bound grows with the number of tokens; say how many there are, e.g. Ball(radius, tokens=n)"
        )
    pair_bias(head, domain)  # rows that see nothing are refused
    value = root(3) * head.w * (g.square() * (4 * tokens + 1) + tokens).sqrt()
    hypotheses = (
        checked("softmax rows"),
        checked("scores are one bilinear form"),
        checked("every token is in a ball about 0"),
    )
    return Bound(value, (*hypotheses, checked("the number of tokens")))


def pull_on_ball(head: Head, domain: Domain) -> Upper:
    """g = |A| R² on the smallest ball about 0 that holds the tokens;
    a query bias is one more coordinate of the tokens.
    """
    form = head.form(head.width(width_of(domain)))
    if form is None:
        raise Refusal("it was published for scores that are one bilinear form xᵀAy")
    reach = gibbs_balls(head, domain)[0][0].reach  # all balls hold the same tokens
    bias = length(form.beta) + form.error_beta
    if float(bias) == 0 or float(reach) == 0:
        return form.norm * reach.square()
    # The best c² solves 2|A|²c⁴ + |β|²c² = |β|²R², so it is at most R².
    c = float(reach) * 1.2 ** torch.arange(-40, 1, dtype=torch.float64)
    norms = (form.norm.square() + (bias / exact_lower(c)).square()).sqrt()
    return (norms * (reach.square() + exact(c).square())).amin()
