"""The own token: how far a row of attention moves when its token alone does."""

from __future__ import annotations

from regard._upper import least
from regard.domains import Domain
from regard.norms import OwnToken
from regard.proofs.rows import gibbs_balls
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem, checked

THEOREM = Theorem(
    name="own_token",
    title="softmax attention and the own token",
    statement=r"""
Tokens in the ball $B(c, R)$, with the slopes of `token_max`, any mask, any fixed bias, any weights. For
sequences $x$, $x'$ that differ in token $i$ alone:
$$ |f_i(x) - f_i(x')| \le w\left(\frac{1 + \sqrt{1 + h^2}}2 + R\kappa\right)|x_i - x'_i|,\quad h = R\alpha. $$
For tokens about zero and scores $x^\top Ay$ it is $w(\frac12(1 + \sqrt{1 + g^2}) + g)$ with $g = \|A\|R^2$.
A map of each token alone has its constant, sums add, residual connections add one, slices have the largest.
Compositions multiply where one map at most looks at other tokens, or where all look at what came before
alone: then token $i$ sees others that have not moved.
If $x + f(x)$ is causal and this is less than one on all of space, it is a bijection, and the determinant of
its derivative is $\prod_i\det(I + \partial f_i/\partial x_i)$.
""",
    hypotheses=("softmax rows", "values affine in the tokens", "tokens in a ball"),
    proof=r"""
Token $i$ is the query of row $i$ and one of its keys. With $p$ the weight that the row gives to its own
token, $y = x_i - \mathbb{E}_ix$, and $v$ and $z_j$ the slopes in key and query: $\partial f_i/\partial x_i =
W^\top\{p(I + yv^\top) + \mathrm{Cov}_i(x, z)\}$. The covariance is at most $R\kappa$. The law of row $i$ has
an atom $p$ at $x_i$ and the rest elsewhere, with mean $m$: $y = (1 - p)(x_i - m)$, and along $x_i - m$ the
variance is at least that between the two parts, $p(1 - p)|x_i - m|^2$, and at most $R^2$. So $p|y| =
\sqrt p\sqrt{p(1-p)^2|x_i - m|^2} \le R\sqrt{p(1-p)}$, and $\|p(I + yv^\top)\| \le p + h\sqrt{p(1 - p)}$. The
largest value over $p = \frac12(1 + \cos\theta)$ is that of $\frac12(1 + \cos\theta + h\sin\theta)$, which is
$\frac12(1 + \sqrt{1 + h^2})$. Where the mask hides the own token, $p = 0$. The ball is convex, so the
constant is the largest norm of this derivative. A key that counts several times is an atom too. Compositions
of causal maps: the tokens before $i$ do not move, those after it are not seen by token $i$, so that they may
be taken as equal. Bijection: token by token, $x_i \mapsto x_i + f_i(x_1, \dots, x_i)$ is the identity plus a
contraction; the derivative is block triangular. Dot products have no such
constant on all of space, and the map of (zha2021), which takes them there, is not a bijection.
""",
)


@THEOREM.constant(Head, Domain, OwnToken)
def own_token(head: Head, domain: Domain, norm: OwnToken) -> Bound:
    """w ((1 + √(1 + h²))/2 + Rκ), h = Rα, the smallest over balls that hold the tokens."""
    values = []
    for ball, slopes in gibbs_balls(head, domain, slot=True):
        key = (1 + (1 + (ball.radius * slopes.alpha).square()).sqrt()).halved()
        values.append(head.w * (key + ball.radius * slopes.kappa))
    hypotheses = (checked("softmax rows"), checked("every token is in a ball of finite radius"))
    return Bound(least(values), hypotheses)
