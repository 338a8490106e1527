"""How far apart a flow and the flow of its merged particles can come, step by step.

Let every particle be within ε of its atom. The attention of a query to the particles is a quotient of two
numbers that are linear in the law of the particles of each atom, so its largest value in any direction is
attained where each atom stands at one point: particles that were split do no more than atoms that move, seen
by a query that moves by itself. That is a `deviation` of the atoms, beside copies of them without mass.

With δ the deviation for tokens that move by ε, one Euler step of length h takes ε to at most

    ε + hδ                                                       (x' = A(x)),
    (1-h)ε + hδ                                                  (x' = A(x) - x, h ≤ 1),
    √( ε²(1 - h(λ + λ⁻)) + 2hεδ + h²(δ + ε(α + δ))² )            (on the sphere),

where λ = ⟨a, x⟩ at an atom, α ≥ |a|, and λ⁻ = λ - δ - εα. On the sphere y = x + hv, v = a - λx, has
|y - y'|² = |x - x'|² + 2h⟨x - x', a - a'⟩ - h(λ + λ')|x - x'|² + h²|v - v'|², and y ↦ y/|y| brings nothing
apart outside of the ball, where y is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._round import outward
from regard.attention import Attention
from regard.domains import Neighborhood
from regard.dynamics.displacement import Displacement
from regard.dynamics.spaces import Euclidean, Space, Sphere
from regard.lookups import Identity
from regard.maps import Mapping
from regard.measure import Measure
from regard.normalizers import Softmax
from regard.norms import TokenMax
from regard.potentials import Gaussian
from regard.proofs.certification import deviation
from regard.supports import Full

HYPOTHESES = ("softmax rows that see every particle", "Euler steps of the same length in both flows")


def refusal(map: Mapping, space: Space) -> str | None:
    """Why nothing is proved of merged particles in such a flow."""
    inner = map.map if isinstance(map, Displacement) else map
    if not isinstance(inner, Attention):
        return f"the field is a {type(inner).__name__}; give one Attention, or its Displacement."
    if not isinstance(inner.normalizer, Softmax):
        return f"rows of {type(inner.normalizer).__name__} are not quotients of sums."
    if not isinstance(inner.support, Full):
        return "a mask distinguishes particles that are in the same place."
    if not isinstance(space, (Euclidean, Sphere)):
        return f"steps in {space!r} have no bound; take Euclidean() or Sphere()."
    return None


def apart_after(
    map: Mapping, atoms: Measure, value: Tensor, apart: float, step: float, space: Space
) -> float:
    """At most how far particles are from their atoms after one Euler step, if they are `apart` before it.

    value: the field at the atoms.
    """
    if apart == 0:
        return 0.0
    inner = map.map if isinstance(map, Displacement) else map
    assert isinstance(inner, Attention)
    change = _change(inner, atoms, apart)
    if isinstance(map, Displacement):
        value = value + atoms.points
    if isinstance(space, Sphere):  # where what a displacement takes from x has no part along the sphere
        return _on_the_sphere(atoms.points.double(), value.double(), apart, change, step)
    if isinstance(map, Displacement):
        return outward(abs(1 - step) * apart + step * change)
    return outward(apart + step * change)


def _change(attention: Attention, atoms: Measure, apart: float) -> float:
    """At most how far the value of a query moves, if it and every part of every atom moves by `apart`."""
    if _plain(attention):
        return _gaussian_change(attention, atoms, apart)
    return deviation(attention, Neighborhood(_beside(atoms), apart, TokenMax()), TokenMax()).value


def _plain(attention: Attention) -> bool:
    """Whether scores are Gaussian and values the points themselves; theorems about neighborhoods are about
    bilinear scores.
    """
    potential = attention.potential
    if not isinstance(potential, Gaussian) or not isinstance(attention.lookup, Identity):
        return False
    return all(w is None for w in (potential.w_q, potential.w_k, potential.b_q, potential.b_k))


def _gaussian_change(attention: Attention, atoms: Measure, apart: float) -> float:
    """ε + Σ_k p_k (e^{η_k} - 1)|c_k - m| / Σ_k p_k e^{-η_k}, for the law p of a row, its mean m and atoms c_k
    at distances d_k: scores change by no more than η_k = (2εd_k + 2ε²)/h². What rounding does to laws is far
    below a billionth of them where scores are below a million; larger ones have no bound here.
    """
    assert isinstance(attention.potential, Gaussian)
    assert isinstance(attention.normalizer, Softmax)
    points = atoms.points.detach().double()
    width = float(attention.potential.bandwidth_at(points.shape[-1]))
    heat = float(attention.normalizer.temperature)
    square = width * width * heat  # a power of floats raises where a product is infinite
    distances = _distances(points, points)
    scores = -distances.square() / (2 * square)
    if float(scores.amin()) < -1e6:
        return math.inf
    laws = (scores + atoms.log_masses().detach().double()).softmax(-1)
    scores_move = (2 * apart * distances + 2 * apart * apart) / square * (1 + 1e-9)
    moved = (laws * scores_move.expm1() * _distances(laws @ points, points)).sum(-1)
    ratio = moved / (laws * (-scores_move).exp()).sum(-1)
    lost = 1e-9 * float(ratio.amax()) + 1e-14 * float(points.abs().amax())
    return outward(apart + float(ratio.amax()) + lost) if bool(torch.isfinite(ratio).all()) else math.inf


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _beside(atoms: Measure) -> Measure:
    """The atoms, and copies of them that have no mass and so are queries alone."""
    masses = atoms.log_masses().double()
    points = atoms.points.detach().double()
    return Measure(torch.cat([points, points]), torch.cat([masses, torch.full_like(masses, -math.inf)]))


def _on_the_sphere(points: Tensor, value: Tensor, apart: float, change: float, step: float) -> float:
    """The same for the part of the values along the sphere."""
    along = (points * value).sum(-1)
    longest = outward(float(torch.linalg.vector_norm(value, dim=-1).amax()))
    other = along - outward(change + apart * longest)
    pulled = 1 - step * (along + other) + 1e-13 * (1 + step * longest)
    bent = step * (change + apart * (longest + change))
    if not bent < 2:
        return 2.0  # the diameter of the sphere
    squares = apart**2 * pulled.clamp_min(0.0) + 2 * step * apart * change + bent**2
    return min(2.0, outward(math.sqrt(outward(float(squares.amax())))))
