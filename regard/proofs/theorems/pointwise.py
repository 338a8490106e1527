"""Activations: the largest slope of one function of one number."""

from __future__ import annotations

from regard.domains import Domain, Near
from regard.maps import Pointwise
from regard.norms import Norm
from regard.proofs.setting import moves_of
from regard.proofs.theorem import Bound, Theorem, checked
from regard.proofs.tokenwise import length_of_moves, steepness, travel

THEOREM = Theorem(
    name="pointwise",
    title="activations",
    statement=r"""
$x \mapsto \varphi(x)$ entry by entry has the constant $\sup|\varphi'|$ in every norm: 1 for ReLU and tanh,
$1.12890\ldots \le 1.12891$ for GELU,
$1.12899\ldots \le 1.12900$ for its tanh form, $1.09983\ldots \le 1.09984$ for $x\sigma(sx)$ with any $s$.
""",
    hypotheses=("the slope of the activation is known",),
    proof=r"""
The derivative is diagonal. $\frac{d}{dx}\,x\Phi(x) = \Phi(x) + x\phi(x)$ is largest at $x = \sqrt 2$, where
$\phi(x)(2 - x^2) = 0$. $\frac{d}{dx}\,x\sigma(x) =
\sigma(1 + x(1-\sigma))$ is largest where $2 + x(1 - 2\sigma) = 0$, $x = 2.3993\ldots$; $x\sigma(sx) =
\varphi(sx)/s$ has the same slopes.
""",
)


@THEOREM.constant(Pointwise, Domain, Norm)
def pointwise(map: Pointwise, domain: Domain, norm: Norm) -> Bound:
    """sup|φ'|."""
    return Bound(steepness.one(map.activation), (checked("the slope of the activation"),))


@THEOREM.deviation(Pointwise, Near, Norm)
def move_bound(map: Pointwise, domain: Near, norm: Norm) -> Bound:
    """sup|φ'| r_i for each token."""
    return Bound(
        length_of_moves(domain, travel.one(map, domain.measure.points, moves_of(domain)), norm),
        (checked("the slope of the activation"),),
    )
