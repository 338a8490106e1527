"""How much scores bend: the norm of the form that pairs of tokens enter,
for scores that are bilinear in pairs.
"""

from __future__ import annotations

from regard._enclosed import product_norm
from regard._upper import Upper, exact, total
from regard._verb import Verb
from regard.potentials import Bilinear, Dot, Potential, Rotary
from regard.potentials.base import Scaled, Sum
from regard.potentials.positions import PositionPotential
from regard.proofs.scores import FACTOR, bilinear

curvature = Verb("curvature")
"""curvature.one(potential, width) -> at least max |A_ij|₂ where scores are x_iᵀ A_ij x_j + β_ij·x_j +
γ_ij·x_i + B_ij; else None.

Examples:
    >>> bound = regard.theorems.curvature(regard.Dot(torch.eye(2), 3 * torch.eye(2), scale=1.0), 2)
    >>> bool(bound.bound >= 3)
    True
"""


@curvature.rule(Potential)
def _any(potential: Potential, width: int) -> Upper | None:
    form = bilinear.one(potential, width)
    return None if form is None else form.norm


@curvature.rule(PositionPotential)
def _fixed(potential: PositionPotential, width: int) -> Upper:
    return exact(0.0)


@curvature.rule(Dot)
@curvature.rule(Bilinear)
def _form(potential: Dot | Bilinear, width: int) -> Upper:
    norm: Upper = bilinear.one(potential, width).norm
    return norm


@curvature.rule(Rotary)
def _rotary(potential: Rotary, width: int) -> Upper | None:
    inner = potential.potential
    if isinstance(inner, Scaled):
        found = _rotary(
            Rotary(inner.potential, potential.base, potential.frequencies, potential.interleaved), width
        )
        return None if found is None else Upper(abs(float(inner.factor)), FACTOR) * found
    if not isinstance(inner, Dot):
        return None
    scale = Upper(abs(float(inner.factor(width if inner.w_q is None else inner.w_q.shape[-1]))), FACTOR)
    return scale * product_norm(inner.w_q) * product_norm(inner.w_k)


@curvature.rule(Sum)
def _sum(potential: Sum, width: int) -> Upper | None:
    form = bilinear.one(potential, width)
    if form is not None:
        return form.norm
    found = [curvature.one(term, width) for term in potential.terms]
    return None if any(value is None for value in found) else total(found)


@curvature.rule(Scaled)
def _scaled(potential: Scaled, width: int) -> Upper | None:
    found = curvature.one(potential.potential, width)
    return None if found is None else Upper(abs(float(potential.factor)), FACTOR) * found
