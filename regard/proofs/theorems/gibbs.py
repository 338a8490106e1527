"""The Boltzmann–Gibbs transformation is Lipschitz in W₁ on a bounded set."""

from __future__ import annotations

from torch import Tensor

from regard._enclosed import length, lengths
from regard._upper import Upper
from regard.attention import Attention
from regard.domains import Ball, Domain
from regard.norms import Wasserstein
from regard.potentials import Potential
from regard.proofs.certification import declare
from regard.proofs.scores import BallFacts, bilinear, slopes
from regard.proofs.setting import balls_of, equivariant
from regard.proofs.subject import Head, single_heads
from regard.proofs.theorem import Bound, Refusal, Theorem, checked
from regard.tilt import Tilt

THEOREM = Theorem(
    name="gibbs",
    title="the Boltzmann–Gibbs transformation in W₁",
    statement=r"""
On a bounded set $E$ with $G = e^a > 0$:
$$ W_1(\Psi_G\mu, \Psi_G\nu) \le \frac{\|G\|_\infty + \mathrm{diam}(E)\,\mathrm{Lip}(G)}{\max(\mu(G),
\nu(G))}\,W_1(\mu, \nu) \le e^{\mathrm{osc}\,a}\,(1 + \mathrm{diam}(E)\,\mathrm{Lip}(a))\,W_1(\mu, \nu). $$
For $a(y) = q^\top A y + \beta\cdot y$ on a ball of radius $R$: $\mathrm{Lip}(a) = |A^\top q + \beta|$ and
$\mathrm{osc}\,a = 2R\,\mathrm{Lip}(a)$.
""",
    hypotheses=("tokens in a ball", "p = 1", "no positions"),
    source="(vuckovic2020)",
    proof=r"""
Let $f$ be 1-Lipschitz and $c = \Psi_G(\nu)(f)$. Then $\Psi_G(\mu)(f) - c = (\mu - \nu)(G(f - c))/\mu(G)$,
because $\nu(G(f - c)) = 0$. $|f - c| \le \mathrm{diam}(E)$ on $E$, so $G(f - c)$ has slope at most
$\|G\|_\infty + \mathrm{diam}(E)\,\mathrm{Lip}(G)$; take the supremum over $f$. Exchange $\mu$ and $\nu$ for
the maximum. The second form uses $\mathrm{Lip}(G) \le \|G\|_\infty\mathrm{Lip}(a)$ and $\mu(G) \ge \inf G$.
The theorem is the authors'; the constants are proved here.
""",
)


@declare.rule(Tilt)
def _itself(tilt: Tilt) -> Tilt:
    return tilt


@THEOREM.constant(Tilt, Domain, Wasserstein)
def gibbs(tilt: Tilt, domain: Domain, norm: Wasserstein) -> Bound:
    """e^osc (1 + 2Rα), α the slope of the scores of the query."""
    if norm.p != 1:
        raise Refusal(
            f"the transformation changes weights, which W_p does not see linearly for p = {norm.p:g}; use "
            "Wasserstein(1.0)"
        )
    if not isinstance(domain, Ball):
        raise Refusal("the bound needs a bounded set of tokens; use Ball(radius)")
    query = tilt.query.detach().double()
    if domain.center is not None and len(domain.center) != len(query):
        raise Refusal(
            f"the query has width {len(query)} and tokens {len(domain.center)}; the bound is for one space"
        )
    (ball,) = balls_of(domain, len(query))
    alpha, osc = _slope(_potential(tilt, domain), ball, query)
    value = osc.exp() * (1 + 2 * ball.radius * alpha)
    return Bound(
        value,
        (checked("every token is in a ball of finite radius"), checked("scores do not look at positions")),
    )


def _potential(tilt: Tilt, domain: Domain) -> Potential:
    """The potential in float64, one head, without positions."""
    heads = single_heads(Attention(tilt.potential))
    if len(heads) > 1:
        raise Refusal(
            f"the potential has {len(heads)} heads, each with a transformation of "
            "its own; bound them one by one"
        )
    equivariant(Head(heads[0]), domain)
    return heads[0].potential


def _slope(potential: Potential, ball: BallFacts, query: Tensor) -> tuple[Upper, Upper]:
    """How steep the scores of one query are on the ball, and how far apart."""
    form = bilinear.one(potential, len(query))
    if form is not None:
        alpha = form.shift(query)
        return alpha, 2 * ball.radius * alpha
    # The query need not be in the ball: a larger ball with the same center holds both.
    radius = ball.radius.maximum(lengths(query - ball.center, 1))
    found = slopes.one(potential, BallFacts(ball.center, radius, length(ball.center) + radius))
    return found.alpha, found.osc.minimum(2 * ball.radius * found.alpha)
