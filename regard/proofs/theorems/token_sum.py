"""Self-attention in TokenSum norm."""

from __future__ import annotations

from regard._upper import least
from regard.domains import Domain
from regard.norms import TokenSum
from regard.proofs.rows import gibbs_balls
from regard.proofs.setting import crowding
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem, checked

THEOREM = Theorem(
    name="token_sum",
    title="softmax attention in TokenSum norm",
    statement=r"""
With the notation of `frobenius`: $$ L_1 \le w\left(N(1 + 2R\alpha) + R\kappa\right). $$
""",
    hypotheses=(
        "softmax rows",
        "values affine in the tokens",
        "tokens in a ball",
        "the number of tokens is given",
    ),
    proof=r"""
The block of row $i$ and column $j$ is $W^\top P_{ij}(I + y_{ij}v_{ij}^\top)$ plus, on the diagonal,
$W^\top\mathrm{Cov}_i(x, z)$. $|y_{ij}| \le 2R$, so its norm is at
most $wP_{ij}(1 + 2R\alpha)$; the TokenSum norm of a map is at most the largest column sum of block norms.
""",
)


@THEOREM.constant(Head, Domain, TokenSum)
def token_sum(head: Head, domain: Domain, norm: TokenSum) -> Bound:
    """w (N (1 + 2Rα) + Rκ), the smallest over balls that hold the tokens."""
    values = []
    for ball, slopes in gibbs_balls(head, domain, slot=True):
        crowd = crowding(head, domain, slopes.osc)
        values.append(head.w * (crowd * (1 + 2 * ball.radius * slopes.alpha) + ball.radius * slopes.kappa))
    return Bound(
        least(values),
        (
            checked("softmax rows"),
            checked("every token is in a ball of finite radius"),
            checked("the number of tokens"),
        ),
    )
