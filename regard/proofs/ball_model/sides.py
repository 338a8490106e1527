"""Queries, keys and values near a sequence: projected tokens with bounds of their moves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper, relative_error
from regard.proofs.ball_model.ellipsoids import longest, pushed
from regard.proofs.ball_model.quadratic import form_norms
from regard.proofs.ball_model.scores import Projection
from regard.proofs.ball_model.state import State


@dataclass
class Side:
    """Projected tokens: values z (n, c), their derivatives (n, c, k) and bounds of their moves.

    first: at least |w_iᵀA_i|₂. rest: at least how far z moves beside w_iᵀA_i u. size: at least the sizes that
    derivatives are made of, |w_i|_F (|A_i|_F + …).
    """

    w: Tensor
    value: Tensor
    moves: Tensor
    first: Upper
    rest: Upper
    size: Upper
    whole: Upper


def _side(state: State, projection: Projection, moves: Tensor) -> Side:
    """moves: wᵀ times A and B."""
    w, b = projection.w, projection.b
    value = (state.center.unsqueeze(-2) @ w).squeeze(-2) + b
    thick = computed_lengths(w.flatten(1))
    first = form_norms(moves[..., : state.linear.shape[-1]])
    unit = relative_error(state.width + 4)
    size = thick * state.size
    whole = thick * (computed_lengths(state.center) + state.reach) + computed_lengths(b)
    rest = longest(pushed(w.mT, state.rest_shape)) + unit * size
    return Side(w, value, moves, first + unit * size, rest, size, whole)


def sides(state: State, projections: list[Projection]) -> list[Side]:
    """Those of all heads: one product with the derivatives."""
    count = max(len(projection.w) for projection in projections)
    joined = torch.cat([projection.w.expand(count, -1, -1) for projection in projections], -1)
    moves = (joined.mT @ state.moves).split([projection.w.shape[-1] for projection in projections], 1)
    return [_side(state, projection, move) for projection, move in zip(projections, moves, strict=True)]


def product_norms(q: Tensor, k: Tensor, q_norm: Upper, k_norm: Upper) -> Upper:
    """At least |Q_iᵀK_j|₂ of (n, c, d0) each, (n, n): tr((QQᵀKKᵀ)²)^{1/4}, or the product of norms."""
    both = (q @ q.mT).unsqueeze(1) @ (k @ k.mT).unsqueeze(0)
    fourth = (both * both.mT).sum((-2, -1)).clamp_min(0.0)
    whole = computed_lengths(q.flatten(1)).unsqueeze(-1) * computed_lengths(k.flatten(1))
    unit = relative_error(2 * q.shape[-1] + 4 * q.shape[1] + 32)
    found = (Upper(fourth) + unit * whole.square().square()).sqrt().sqrt()
    return found.minimum(q_norm.unsqueeze(-1) * k_norm)
