"""Projections of tokens: into a ball, and onto those with mean zero. The constant is one, and after the first
the tokens are bounded wherever they came from.
"""

from __future__ import annotations

from regard._upper import exact
from regard.domains import Domain, Near
from regard.nonexpansive import Center, IntoBall
from regard.norms import EntryMax, Norm
from regard.proofs.setting import moves_of, width_of
from regard.proofs.theorem import Bound, Theorem, checked
from regard.proofs.tokenwise import length_of_moves, refuse_entries, travel

THEOREM = Theorem(
    name="projection",
    title="projections of tokens",
    statement=r"""
$x_i \mapsto x_i\min(1, R/|x_i|)$, $x_i \mapsto x_i/\sqrt{1 + |x_i|^2/R^2}$ and $x_i \mapsto x_i -
\mathrm{mean}(x_i)$ have the constant 1 in Frobenius, TokenMax and TokenSum norm, in every $W_p$, and for the
own token. It is attained. The third has $2(1 - 1/d)$ in EntryMax norm. The first two send every token into
the ball of radius $R$ about zero, so that a constant $L$ of $f$ on that ball is one of $f$ after them on all
of space.
""",
    hypotheses=(),
    proof=r"""
The first is the nearest point of a convex set: with $p$ and $p'$ the nearest points to $x$ and $x'$,
$(x - p)\cdot(p' - p) \le 0$ and $(x' - p')\cdot(p - p') \le 0$; the sum is $|p - p'|^2 \le (x - x')\cdot(p -
p') \le |x - x'||p - p'|$. The second has at $x$, $\rho = |x|/R$, the symmetric derivative $(1 +
\rho^2)^{-1/2}(I - (1 + \rho^2)^{-1}xx^\top/R^2)$ with eigenvalues $(1 + \rho^2)^{-1/2}$ and $(1 +
\rho^2)^{-3/2}$ in $(0, 1]$. The third is the orthogonal projection $I - \frac1d\mathbf 1\mathbf 1^\top$,
whose rows have the absolute sum $1 - \frac1d + \frac{d-1}d$. Each token goes alone, so that the constant
holds in every norm of the lengths of tokens and for every coupling. Tokens that move inside the ball, or
orthogonally to $\mathbf 1$, attain 1.
""",
)


@THEOREM.constant(IntoBall, Domain, Norm)
def into_ball(map: IntoBall, domain: Domain, norm: Norm) -> Bound:
    """One."""
    refuse_entries(norm, "a projection into a ball")
    return Bound(exact(1.0), (checked("the ball is convex, and each token goes alone"),))


@THEOREM.constant(Center, Domain, Norm)
def center(map: Center, domain: Domain, norm: Norm) -> Bound:
    """One; in EntryMax norm 2(1 - 1/d)."""
    if not isinstance(norm, EntryMax):
        return Bound(exact(1.0))
    width = width_of(domain)
    return Bound(exact(2.0) if width is None else 2 * exact(width - 1) / width)


@THEOREM.deviation(IntoBall, Near, Norm)
@THEOREM.deviation(Center, Near, Norm)
def move_bound(map: IntoBall | Center, domain: Near, norm: Norm) -> Bound:
    """The move of each token; never more than the ball is wide."""
    refuse_entries(norm, "a projection of tokens")
    return Bound(length_of_moves(domain, travel.one(map, domain.measure.points, moves_of(domain)), norm))
