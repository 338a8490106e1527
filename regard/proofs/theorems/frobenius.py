"""Self-attention in Frobenius norm: a constant with the factor √N, N the largest weight that one key can
receive from all queries together.
"""

from __future__ import annotations

from regard._upper import least
from regard.domains import Domain
from regard.norms import Frobenius
from regard.proofs.rows import derivative_balls
from regard.proofs.setting import crowding
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem, checked

THEOREM = Theorem(
    name="frobenius",
    title="softmax attention in Frobenius norm",
    statement=r"""
Tokens in the ball $B(c, R)$, with the slopes of `token_max` and scores of a row within $\mathrm{osc}$ of each
other beside the fixed bias $B$:
$$ L_F \le w\left(\sqrt{N(1 + 2R\nu + R^2\alpha^2)} + R\kappa\right),\qquad
N = \max_j\sum_i \frac{1}{1 + \sum_{k \ne j} e^{B_{ik} - B_{ij} - \mathrm{osc}}}. $$
Without bias $N = n/(1 + (n-1)e^{-\mathrm{osc}}) \le \min(n, e^{\mathrm{osc}})$; causal $N = \sum_{i\le n}
1/(1 + (i-1)e^{-\mathrm{osc}})$, which grows with $n$.
""",
    hypotheses=(
        "softmax rows",
        "values affine in the tokens",
        "tokens in a ball",
        "the number of tokens is given",
    ),
    proof=r"""
As for `token_max`, with $\sum_i \mathbb{E}_i|d|^2 = \sum_j |d_j|^2\sum_i P_{ij} \le N\,\|D\|_F^2$: for every
$i$ and $j$, $P_{ij} \le 1/(1 + \sum_{k\ne j} e^{B_{ik} - B_{ij} - \mathrm{osc}})$. The part of $d_i$ is
diagonal in rows.
""",
)


@THEOREM.constant(Head, Domain, Frobenius)
def frobenius(head: Head, domain: Domain, norm: Frobenius) -> Bound:
    """w (√(N (1 + 2Rν + R²α²)) + Rκ), the smallest over balls that hold the tokens."""
    values = []
    for ball, slopes in derivative_balls(head, domain):
        crowd = crowding(head, domain, slopes.osc)
        spread = (crowd * (1 + 2 * ball.radius * slopes.nu + (ball.radius * slopes.alpha).square())).sqrt()
        values.append(head.w * (spread + ball.radius * slopes.kappa))
    return Bound(
        least(values),
        (
            checked("softmax rows"),
            checked("every token is in a ball of finite radius"),
            checked("the number of tokens"),
        ),
    )
