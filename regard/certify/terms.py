"""The one term of a potential that looks at tokens: what theorems about one kind of score are about."""

from __future__ import annotations

from regard.certify.theorem import Refusal
from regard.potentials import Potential
from regard.potentials.base import linear_terms
from regard.potentials.positions import PositionPotential


def moving_term(potential: Potential) -> tuple[Potential, float]:
    """The term that looks at tokens and the factor before it; terms that look at positions alone are fixed biases and are left out."""
    terms = [(term, float(factor)) for term, factor in linear_terms(potential)]
    if len(terms) == 1:
        return terms[0]
    moving = [pair for pair in terms if not isinstance(pair[0], PositionPotential)]
    if len(moving) != 1:
        raise Refusal("scores that are a sum of several terms have no theorem of this kind; keep one term beside position biases")
    return moving[0]
