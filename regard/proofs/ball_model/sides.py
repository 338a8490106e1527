"""Queries, keys and values near a sequence: projected tokens of several heads, with bounds of their moves."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths, spectral_norms
from regard._upper import Upper, relative_error, sizes
from regard.proofs.ball_model.ellipsoids import ball_shape, lift, longest, roundest
from regard.proofs.ball_model.quadratic import form_norms
from regard.proofs.ball_model.scores import Projection
from regard.proofs.ball_model.state import State
from regard.proofs.ball_model.updates import each, half_products


@dataclass
class Side:
    """Projected tokens, with a first dimension of heads or none: values z (n, c), their derivatives (n, c, k)
    by u, and by groups for values, and bounds of their moves.

    first: at least |w_iᵀA_i|₂. around: an ellipsoid (n, c, c) of how far z moves beside w_iᵀA_i u, but
    for rounding, and rest: at least that. size: at least the sizes that derivatives are made of, |w_i|_F
    (|A_i|_F + …). whole: at least the sizes that z is made of, anywhere.
    """

    w: Tensor
    value: Tensor
    moves: Tensor
    around: Tensor
    first: Upper
    rest: Upper
    size: Upper
    whole: Upper

    def __getitem__(self, heads: int | slice) -> Side:
        """Those of some heads."""
        return Side(*(getattr(self, field.name)[heads] for field in fields(self)))

    @cached_property
    def length(self) -> Upper:
        """At least |z| anywhere in the neighborhood, but for the rounding of z at the center."""
        return computed_lengths(self.value) + self.first + self.rest


def sides(state: State, projections: list[Projection], by_groups: bool) -> Side:
    """Those of heads of one shape: one product with the derivatives, and one with the ellipsoids."""
    w = torch.stack([projection.w for projection in projections])
    b = torch.stack([projection.b for projection in projections])
    joined = _joined(w)
    moves = _moved(state, joined, len(w)) if by_groups else _linear(state, joined, len(w))
    first = form_norms(moves[..., : state.linear.shape[-1]])
    around, rest = _still(state, w) if state.is_still else _moving(state, w, joined)
    value = (state.center.unsqueeze(-2) @ w).squeeze(-2) + b
    thick = computed_lengths(w.flatten(-2))
    lost = relative_error(state.width + 4) * thick * state.size
    terms = (sizes(state.center).unsqueeze(-2) @ sizes(w)).map(lambda value: value.squeeze(-2))
    whole = terms.norm() + thick * state.reach + computed_lengths(b)
    return Side(w, value, moves, around, first + lost, rest + lost, thick * state.size, whole)


def _joined(matrices: Tensor) -> Tensor:
    """The columns of all heads side by side, (h, n or 1, d, c) to (n or 1, d, h c)."""
    return matrices.movedim(0, -2).flatten(-2)


def _linear(state: State, joined: Tensor, heads: int) -> Tensor:
    """wᵀ times A, (h, n, c, k)."""
    found = each(joined[0].mT, state.linear) if len(joined) == 1 else joined.mT @ state.linear
    return found.unflatten(1, (heads, -1)).transpose(0, 1).contiguous()


def _moved(state: State, joined: Tensor, heads: int) -> Tensor:
    """wᵀ times A and B, (h, n, c, k)."""
    columns, filled = state.groups.columns, state.groups.filled
    first, width = state.linear.shape[-1], joined.shape[-1] // heads
    found = columns.new_empty(heads, len(columns), width, first + columns.shape[-1])
    _project(joined, state.linear, None, found[..., :first])
    _project(joined, columns, filled, found[..., first:])
    return found


def _project(joined: Tensor, columns: Tensor, filled: tuple[int, ...] | None, found: Tensor) -> None:
    """wᵀ times columns (n, d, k) into (h, n, c, k), without those that are zero for a token."""
    for i, one in enumerate(columns):
        count = one.shape[-1] if filled is None else filled[i]
        made = joined[i % len(joined)].mT @ one[:, :count]
        found[:, i, :, :count] = made.unflatten(0, (len(found), -1))
        found[:, i, :, count:] = 0.0


def projected(w: Tensor, columns: Tensor) -> Tensor:
    """wᵀ times columns (n, d, k), for matrices (h, n or 1, d, c), (h, n, c, k)."""
    found = columns.new_empty(len(w), len(columns), w.shape[-1], columns.shape[-1])
    _project(_joined(w), columns, None, found)
    return found


def group_slopes(columns: Tensor, by_query: Tensor, by_key: Tensor) -> Tensor:
    """How scores move with columns (n, d, k), (h, n, n, k): (w_q k_j)ᵀB_i + (w_k q_i)ᵀB_j, for directions w_q
    k_j and w_k q_i (h, n or 1, d, n).
    """
    heads, n = len(by_query), len(columns)
    queries, keys = _joined(by_query), _joined(by_key)
    found = columns.new_empty(heads, n, n, columns.shape[-1])  # of query i and key j
    for i, one in enumerate(columns):
        found[:, i] = (queries[i % len(queries)].mT @ one).unflatten(0, (heads, n))
    for j, one in enumerate(columns):
        found[:, :, j] += (keys[j % len(keys)].mT @ one).unflatten(0, (heads, n))
    return found


def directions(first: Side, second: Side) -> Tensor:
    """w z of the one with values z of the other, (n or 1, d, n): along which a token moves scores."""
    return first.w @ second.value.mT.unsqueeze(-3)


def _moving(state: State, w: Tensor, joined: Tensor) -> tuple[Tensor, Upper]:
    """Ellipsoids wᵀQw of how far projections move beside their derivatives, and at least that."""
    pairs = zip(state.rest_shape, joined.expand(state.tokens, -1, -1), strict=True)
    half = torch.stack([half_products(shape, one) for shape, one in pairs])
    around = w.mT @ half.unflatten(-1, (len(w), -1)).movedim(-2, 0)
    size = computed_lengths(state.rest_shape.flatten(1)) * computed_lengths(w.flatten(-2)).square()
    around = lift(around + around.mT, relative_error(2 * state.width + 6) * size)
    return around, longest(around)


def _still(state: State, w: Tensor) -> tuple[Tensor, Upper]:
    """The same by lengths."""
    rest = spectral_norms(w) * roundest(state.shape)
    return ball_shape(rest, w.shape[-1]), rest


def product_norms(q: Tensor, k: Tensor, q_norm: Upper, k_norm: Upper) -> Upper:
    """At least |Q_iᵀK_j|₂ of (n, c, d0) each, (n, n): tr((QQᵀKKᵀ)²)^{1/4}, or the product of norms."""
    both = (q @ q.mT).unsqueeze(-3) @ (k @ k.mT).unsqueeze(-4)
    fourth = (both * both.mT).sum((-2, -1)).clamp_min(0.0)
    whole = computed_lengths(q.flatten(-2)).unsqueeze(-1) * computed_lengths(k.flatten(-2)).unsqueeze(-2)
    unit = relative_error(2 * q.shape[-1] + 4 * q.shape[-2] + 32)
    found = (Upper(fourth) + unit * whole.square().square()).sqrt().sqrt()
    return found.minimum(q_norm.unsqueeze(-1) * k_norm.unsqueeze(-2))
