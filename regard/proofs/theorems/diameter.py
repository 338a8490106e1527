"""A deviation from a range: two values in one ball are at most a diameter apart."""

from __future__ import annotations

from regard.domains import Ball, Near
from regard.maps import Map
from regard.norms import Norm
from regard.proofs.floors import spread
from regard.proofs.imaging import image, norm_factor, outputs
from regard.proofs.locating import enclosing
from regard.proofs.setting import radius_of
from regard.proofs.theorem import Bound, Refusal, Theorem, checked

THEOREM = Theorem(
    name="diameter",
    title="diameter of the image",
    statement=r"""
If every token of $f(x')$ lies in a ball of radius $\rho$ for all $x'$ of a neighborhood, then $|f(x')_i -
f(x)_i| \le 2\rho$ for every token.
""",
    hypotheses=("the image lies in a ball",),
    proof="The triangle inequality. Norm layers and averages keep values bounded "
    "however far the sequence moves.",
)


def _floor(map: Map, domain: Near, norm: Norm) -> float:
    """The tokens of the value itself are in the ball."""
    tokens = outputs(map, domain.measure.size)
    return 0.0 if tokens is None else spread(map, domain) * float(norm_factor(norm, tokens))


@THEOREM.deviation(Map, Near, Norm, floor=_floor)
def diameter(map: Map, domain: Near, norm: Norm) -> Bound:
    """2ρ, times √n in Frobenius and n in TokenSum norm."""
    held = image(map, enclosing(domain))
    if not isinstance(held, Ball):
        raise Refusal("the image is not bounded; put a norm layer first, or use a smaller radius")
    tokens = outputs(map, domain.measure.size)
    assert tokens is not None
    return Bound(
        2 * radius_of(held) * norm_factor(norm, tokens),
        (checked(f"every value is in a ball of radius {held.radius:.6g}"),),
    )
