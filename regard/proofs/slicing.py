"""sliced: the domain of one slice of the coordinates, where tokens of a domain are cut into equal ones."""

from __future__ import annotations

from torch import Tensor

from regard.domains import Ball, Domain, Near, Neighborhood, Radii, Whole
from regard.measure import Measure
from regard.proofs.theorem import Refusal


def sliced(domain: Domain, index: int, count: int) -> Domain:
    """Where slice `index` of `count` is: no slice moves farther than its token."""
    if isinstance(domain, Whole):
        return domain
    if isinstance(domain, Ball):
        center = None if domain.center is None else domain.center.chunk(count, -1)[index]
        return Ball(domain.radius, center, domain.tokens)
    if isinstance(domain, Near):
        return _near(domain, index, count)
    raise Refusal(
        f"slices of tokens of a {type(domain).__name__} may be anywhere; use Ball(radius), or Whole()"
    )


def _near(domain: Near, index: int, count: int) -> Near:
    points = domain.points
    cut: Tensor | Measure = (
        points.replace(points=points.points.chunk(count, -1)[index])
        if isinstance(points, Measure)
        else points.chunk(count, -1)[index]
    )
    if isinstance(domain, Radii):
        return Radii(cut, domain.radii)
    assert isinstance(domain, Neighborhood)
    return Neighborhood(cut, domain.radius, domain.norm)
