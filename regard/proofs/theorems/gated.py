"""Gated feed-forward layers: products of two affine maps, so a constant needs bounded tokens."""

from __future__ import annotations

from torch import Tensor

from regard._upper import least
from regard.domains import Domain, Near
from regard.maps import Gated
from regard.norms import Norm, Wasserstein
from regard.proofs.setting import balls_of, finite_ball, moves_of
from regard.proofs.theorem import Bound, Refusal, Theorem, checked
from regard.proofs.tokenwise import Travel, ball_of, length_of_moves, refuse_entries, travel

THEOREM = Theorem(
    name="gated",
    title="gated feed-forward layers",
    statement=r"""
$x \mapsto W_2^\top(\varphi(W_1^\top x + b_1)\odot(W_3^\top x + b_3))$ on a ball $B(c, R)$, with $L_\varphi =
\sup|\varphi'|$ and $|\varphi(z)| \le |z|$:
$$ L \le \|W_2\|\left(L_\varphi\|W_1\|\,m_3 + m_1\|W_3\|\right),\qquad m_k = \max_c\left(|(W_k^\top c +
b_k)_c| + R\,|W_k e_c|\right). $$
""",
    hypotheses=("tokens in a ball", "the slope of the activation is known"),
    source="(shazeer2020)",
    proof=r"""
The derivative is $W_2^\top(\mathrm{diag}(\varphi' g)W_1^\top + \mathrm{diag}(\varphi)W_3^\top)$, the norm of
a diagonal matrix its largest entry, and $m_k$ bounds the entries on
the ball, which is convex. The source defines the map.
""",
)


@THEOREM.constant(Gated, Domain, Norm)
def product_bound(map: Gated, domain: Domain, norm: Norm) -> Bound:
    """|W₂| (L|W₁| m₃ + m₁|W₃|) on the ball of each token,
    or on one ball of all where tokens are not matched.
    """
    refuse_entries(norm, "a gated layer")
    hypotheses = (
        checked("every token is in a ball of finite radius"),
        checked("the slope of the activation"),
    )
    if isinstance(domain, Near) and not isinstance(norm, Wasserstein):
        return Bound(_near(map, domain).slopes.amax(), hypotheses)
    return Bound(least([travel.one(map, *ball).slopes[0] for ball in _balls(map, domain)]), hypotheses)


@THEOREM.deviation(Gated, Near, Norm)
def move_bound(map: Gated, domain: Near, norm: Norm) -> Bound:
    """The constant on the ball of each token, times its radius."""
    refuse_entries(norm, "a gated layer")
    return Bound(length_of_moves(domain, _near(map, domain), norm), (checked("the slope of the activation"),))


def _near(map: Gated, domain: Near) -> Travel:
    found: Travel = travel.one(map, domain.measure.points, moves_of(domain))
    return found


def _balls(map: Gated, domain: Domain) -> list[tuple[Tensor, Tensor]]:
    """Centers and radii of balls that hold all tokens."""
    if isinstance(domain, Near):
        held = [finite_ball(ball.radius, ball.center, None) for ball in balls_of(domain, len(map.w))]
        return [ball for one in held if (ball := ball_of(one, len(map.w))) is not None]
    found = ball_of(domain, len(map.w))
    if found is None:
        raise Refusal(
            "a gated layer grows like the square of its input, so tokens must be bounded; use "
            "Ball(radius), or put a norm layer first"
        )
    return [found]
