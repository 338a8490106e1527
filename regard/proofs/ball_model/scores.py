"""Scores as products of projected tokens, q_i·k_j with q_i = w_iᵀx_i + b_i: what the ball model needs of a
potential.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._upper import ELEMENTARY
from regard._verb import Verb
from regard.potentials import Bilinear, Dot, Potential, Rotary, SoftCap
from regard.potentials.base import Scaled, Sum
from regard.potentials.positions import PositionPotential
from regard.proofs.scores import FACTOR
from regard.proofs.theorem import Refusal


@dataclass(frozen=True)
class Projection:
    """w (n or 1, d, c) and b (n or 1, c) for each token, right to so many `roundings` of their size."""

    w: Tensor
    b: Tensor
    roundings: int


Pair = tuple[Projection, Projection]

products = Verb("products")
"""products.one(potential, width, marks) -> the projections of queries and keys whose products are the scores,
beside what is fixed for a pair of positions; None where nothing else is there.
"""


@products.rule(Potential)
def _unknown(potential: Potential, width: int, marks: Tensor) -> Pair | None:
    raise Refusal(
        f"scores of {type(potential).__name__} have no ball model; it takes Dot, Bilinear and Rotary scores, "
        "their sums and multiples, and position biases"
    )


@products.rule(SoftCap)
def _capped(potential: SoftCap, width: int, marks: Tensor) -> Pair | None:
    raise Refusal("SoftCap has no ball model: no lemma bounds capped scores; remove the cap, or use certify")


@products.rule(PositionPotential)
def _fixed(potential: PositionPotential, width: int, marks: Tensor) -> Pair | None:
    return None


@products.rule(Dot)
def _dot(potential: Dot, width: int, marks: Tensor) -> Pair:
    w_q, w_k = (_matrix(w, width) for w in (potential.w_q, potential.w_k))
    b_q, b_k = (_bias(b, w_q.shape[-1]) for b in (potential.b_q, potential.b_k))
    factor = float(potential.factor(w_q.shape[-1]))
    query = Projection((factor * w_q).unsqueeze(0), (factor * b_q).unsqueeze(0), FACTOR + 1)
    return query, Projection(w_k.unsqueeze(0), b_k.unsqueeze(0), 0)


@products.rule(Bilinear)
def _bilinear(potential: Bilinear, width: int, marks: Tensor) -> Pair:
    none = torch.zeros(1, width, dtype=torch.float64)
    key = torch.eye(width, dtype=torch.float64).unsqueeze(0)
    return Projection(potential.a.double().unsqueeze(0), none, 0), Projection(key, none, 0)


@products.rule(Scaled)
def _scaled(potential: Scaled, width: int, marks: Tensor) -> Pair | None:
    inner = products.one(potential.potential, width, marks)
    if inner is None:
        return None
    query, key = inner
    factor = float(potential.factor)
    return Projection(factor * query.w, factor * query.b, query.roundings + FACTOR + 1), key


@products.rule(Rotary)
def _rotary(potential: Rotary, width: int, marks: Tensor) -> Pair:
    inner = products.one(potential.potential, width, marks)
    if inner is None:
        raise Refusal("rotary positions of nothing but position biases have no ball model")
    query, key = inner
    return _turned(potential, query, marks), _turned(potential, key, marks)


def _turned(potential: Rotary, projection: Projection, marks: Tensor) -> Projection:
    """Every token's projection turned by its position; an angle is right to its own size."""
    w = potential.rotate(projection.w.transpose(-3, -2).expand(-1, len(marks), -1), marks).transpose(0, 1)
    b = potential.rotate(projection.b.expand(len(marks), -1), marks)
    fastest = 1.0 if potential.frequencies is None else float(potential.frequencies.abs().max())
    angle = math.ceil(float(marks.abs().max()) * fastest)
    return Projection(w.contiguous(), b, projection.roundings + 2 * ELEMENTARY * (angle + 4))


@products.rule(Sum)
def _sum(potential: Sum, width: int, marks: Tensor) -> Pair | None:
    found = [products.one(term, width, marks) for term in potential.terms]
    pairs = [pair for pair in found if pair is not None]
    if len(pairs) < 2:
        return pairs[0] if pairs else None
    query, key = (_beside([pair[side] for pair in pairs]) for side in (0, 1))
    return query, key


def _beside(parts: list[Projection]) -> Projection:
    """Several projections as one: the products of terms add."""
    count = max(len(part.w) for part in parts)
    w = torch.cat([part.w.expand(count, -1, -1) for part in parts], -1)
    b = torch.cat([part.b.expand(count, -1) for part in parts], -1)
    return Projection(w, b, max(part.roundings for part in parts))


def _matrix(weight: Tensor | None, width: int) -> Tensor:
    return torch.eye(width, dtype=torch.float64) if weight is None else weight.detach().double()


def _bias(bias: Tensor | None, width: int) -> Tensor:
    return torch.zeros(width, dtype=torch.float64) if bias is None else bias.detach().double().expand(width)


def no_scores(width: int) -> Pair:
    """Projections whose products are zero."""
    none = Projection(
        torch.zeros(1, width, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64), 0
    )
    return none, none
