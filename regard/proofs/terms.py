"""The one term of a potential that looks at tokens: what theorems about one kind of score are about."""

from __future__ import annotations

from regard.potentials import Potential
from regard.potentials.base import linear_terms
from regard.potentials.positions import PositionPotential
from regard.proofs.theorem import Refusal


def moving_term(potential: Potential) -> tuple[Potential, float]:
    """The term that looks at tokens and the factor before it;
    terms that look at positions alone are fixed biases and are left out.
    """
    moving = moving_terms(potential)
    if len(moving) != 1:
        raise Refusal(
            "scores that are a sum of several terms have no theorem of this kind; keep one term beside "
            "position biases"
        )
    return moving[0]


def moving_terms(potential: Potential) -> list[tuple[Potential, float]]:
    """All terms of a sum that look at tokens, each with its factor;
    a potential that is no sum is its own term.
    """
    terms = [(term, float(factor)) for term, factor in linear_terms(potential)]
    return (
        terms if len(terms) == 1 else [pair for pair in terms if not isinstance(pair[0], PositionPotential)]
    )
