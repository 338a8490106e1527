"""The one term of a potential that looks at tokens: what theorems about one kind of score are about."""

from __future__ import annotations

from regard.certify.theorem import Refusal
from regard.potentials import Potential
from regard.potentials.base import Scaled, Sum
from regard.potentials.positions import PositionPotential


def moving_term(potential: Potential) -> tuple[Potential, float]:
    """The term that looks at tokens and the factor before it; terms that look at positions alone are fixed biases and are left out."""
    moving = moving_terms(potential)
    if len(moving) != 1:
        raise Refusal("scores that are a sum of several terms have no theorem of this kind; keep one term beside position biases")
    return moving[0]


def moving_terms(potential: Potential) -> list[tuple[Potential, float]]:
    """All terms of a sum that look at tokens, each with its factor; a potential that is no sum is its own term."""
    if isinstance(potential, Scaled):
        return [(term, factor * float(potential.factor)) for term, factor in moving_terms(potential.potential)]
    if not isinstance(potential, Sum):
        return [(potential, 1.0)]
    found = [pair for term in potential.terms for pair in moving_terms(term)]
    return [pair for pair in found if not isinstance(pair[0], PositionPotential)]
