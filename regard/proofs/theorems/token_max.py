"""Self-attention in TokenMax norm: a constant that depends neither on the number of tokens nor
exponentially on the radius.
"""

from __future__ import annotations

from regard._upper import least
from regard.domains import Domain
from regard.norms import TokenMax
from regard.proofs.rows import derivative_balls
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem, checked

THEOREM = Theorem(
    name="token_max",
    title="softmax attention in TokenMax norm",
    statement=r"""
Tokens in the ball $B(c, R)$, scores with key slope $|v_{ij}| \le \alpha$ and query slope $z_{ij}$, any mask,
any fixed bias, any weights: $$ L_\infty \le w\left(\sqrt{1 + 2R\nu + R^2\alpha^2} + R\kappa\right), $$
$\nu$ and $\kappa$ the radii of balls that hold $v_{ij}$ and $z_{ij}$ as $j$ varies, $w = \|W\|_2$.
For scores $x_i^\top A x_j + \beta\cdot x_j$: $\nu = 0$, $\kappa = \|A\|R$, $\alpha = \|A^\top c + \beta\| +
\|A\|R$.
""",
    hypotheses=("softmax rows", "values affine in the tokens", "tokens in a ball"),
    proof=r"""
With $P_i$ the row law, $y_j = x_j - \mathbb{E}_i x$: $(Df[D])_i = W^\top\{\mathbb{E}_i[d + y\,(v\cdot d)] +
\mathrm{Cov}_i(x, z)\,d_i\}$. For a unit vector $e$ the first part is at most $\sqrt{\mathbb{E}_i|We + (e\cdot
W^\top y)v|^2}\sqrt{\mathbb{E}_i|d|^2}$, and $\mathbb{E}_i|We + (e\cdot W^\top y)v|^2 = |We|^2 +
2\,\mathrm{Cov}_i(e\cdot W^\top x, We\cdot v) + \mathbb{E}_i(e\cdot W^\top y)^2|v|^2 \le w^2(1 + 2R\nu +
R^2\alpha^2)$, because a law on a ball of radius $R$ has standard deviation at most $R$ in every direction.
$\mathbb{E}_i|d|^2 \le \max_j|d_j|^2$. A ball is convex, so the constant is the supremum of the derivative.
""",
)


@THEOREM.constant(Head, Domain, TokenMax)
def token_max(head: Head, domain: Domain, norm: TokenMax) -> Bound:
    """w (√(1 + 2Rν + R²α²) + Rκ), the smallest over balls that hold the tokens."""
    values = []
    for ball, slopes in derivative_balls(head, domain):
        spread = (1 + 2 * ball.radius * slopes.nu + (ball.radius * slopes.alpha).square()).sqrt()
        values.append(head.w * (spread + ball.radius * slopes.kappa))
    hypotheses = (checked("softmax rows"), checked("every token is in a ball of finite radius"))
    return Bound(least(values), hypotheses)
