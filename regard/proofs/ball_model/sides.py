"""Queries, keys and values near a sequence: projected tokens with bounds of their moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths, spectral_norms
from regard._upper import Upper, relative_error, sizes
from regard.proofs.ball_model.ellipsoids import ball_shape, lifted, longest, roundest
from regard.proofs.ball_model.quadratic import form_norms
from regard.proofs.ball_model.scores import Projection
from regard.proofs.ball_model.state import State
from regard.proofs.ball_model.updates import each


@dataclass
class Side:
    """Projected tokens: values z (n, c), their derivatives (n, c, k) by u, and by groups for values, and
    bounds of their moves.

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

    @cached_property
    def length(self) -> Upper:
        """At least |z| anywhere in the neighborhood, but for the rounding of z at the center."""
        return computed_lengths(self.value) + self.first + self.rest


def sides(state: State, projections: list[Projection], by_groups: bool) -> list[Side]:
    """Those of all heads: one product with the derivatives, and one with the ellipsoids."""
    count = max(len(projection.w) for projection in projections)
    joined = torch.cat([projection.w.expand(count, -1, -1) for projection in projections], -1)
    parts = [projection.w.shape[-1] for projection in projections]
    moves = (_moved(state, joined) if by_groups else _linear(state, joined)).split(parts, 1)
    first = all_at_once(form_norms, [move[..., : state.linear.shape[-1]] for move in moves])
    around, rest = _still(state, projections) if state.is_still else _moving(state, projections, joined)
    made = zip(projections, moves, around, first, rest, strict=True)
    return [_side(state, *one) for one in made]


def _linear(state: State, joined: Tensor) -> Tensor:
    """wᵀ times A."""
    return each(joined[0].mT, state.linear) if len(joined) == 1 else joined.mT @ state.linear


def _moved(state: State, joined: Tensor) -> Tensor:
    """wᵀ times A and B, without columns that are zero for a token."""
    linear, columns, first = state.linear, state.groups.columns, state.linear.shape[-1]
    filled = state.groups.filled or [columns.shape[-1]] * len(columns)
    found = linear.new_empty(len(linear), joined.shape[-1], first + columns.shape[-1])
    for i, count in enumerate(filled):
        w = joined[i % len(joined)].mT
        found[i, :, :first] = w @ linear[i]
        found[i, :, first : first + count] = w @ columns[i, :, :count]
        found[i, :, first + count :] = 0.0
    return found


def group_slopes(state: State, queries: list[Side], keys: list[Side]) -> list[Tensor]:
    """How scores move with the groups (n, n, k), for each head: (w_q k_j)ᵀB_i + (w_k q_i)ᵀB_j."""
    columns, n = state.groups.columns, state.tokens
    by_query = [query.w @ key.value.mT for query, key in zip(queries, keys, strict=True)]
    by_key = [key.w @ query.value.mT for query, key in zip(queries, keys, strict=True)]
    found = columns.new_empty(n, len(queries), n, columns.shape[-1])  # of query i, head, key j
    for sided, is_key in ((by_query, False), (by_key, True)):
        directions = torch.cat(sided, -1)
        for i, one in enumerate(columns):
            made = (directions[i % len(directions)].mT @ one).unflatten(0, (len(queries), n))
            if is_key:
                found[:, :, i] += made.transpose(0, 1)
            else:
                found[i] = made
    return list(found.unbind(1))


def _moving(state: State, projections: list[Projection], joined: Tensor) -> tuple[list[Tensor], list[Upper]]:
    """Ellipsoids of how far projections move beside their derivatives, and at least that."""
    turned = (state.rest_shape @ joined).split([one.w.shape[-1] for one in projections], -1)
    around = [_pushed(state, one.w, part) for one, part in zip(projections, turned, strict=True)]
    return around, all_at_once(longest, around)


def _still(state: State, projections: list[Projection]) -> tuple[list[Tensor], list[Upper]]:
    """The same by lengths."""
    far = roundest(state.shape)
    rest = [norm * far for norm in all_at_once(spectral_norms, [one.w for one in projections])]
    return [ball_shape(far, one.w.shape[-1]) for far, one in zip(rest, projections, strict=True)], rest


def _side(
    state: State, projection: Projection, moves: Tensor, around: Tensor, first: Upper, rest: Upper
) -> Side:
    """moves: wᵀ times A and B."""
    w, b = projection.w, projection.b
    value = (state.center.unsqueeze(-2) @ w).squeeze(-2) + b
    thick = computed_lengths(w.flatten(1))
    lost = relative_error(state.width + 4) * thick * state.size
    terms = (sizes(state.center).unsqueeze(-2) @ sizes(w)).map(lambda value: value.squeeze(-2))
    whole = terms.norm() + thick * state.reach + computed_lengths(b)
    return Side(w, value, moves, around, first + lost, rest + lost, thick * state.size, whole)


def _pushed(state: State, w: Tensor, turned: Tensor) -> Tensor:
    """wᵀQw of what `pushed` would make, with Qw given."""
    size = computed_lengths(state.rest_shape.flatten(1)) * computed_lengths(w.flatten(1)).square()
    return lifted(w.mT @ turned, relative_error(2 * state.width + 4) * size)


def all_at_once(norms: Callable[[Tensor], Upper], parts: list[Tensor]) -> list[Upper]:
    """Norms of many matrices of one size together."""
    if len({part.shape for part in parts}) > 1:
        return [norms(part) for part in parts]
    return list(norms(torch.stack(parts)))


def product_norms(q: Tensor, k: Tensor, q_norm: Upper, k_norm: Upper) -> Upper:
    """At least |Q_iᵀK_j|₂ of (n, c, d0) each, (n, n): tr((QQᵀKKᵀ)²)^{1/4}, or the product of norms."""
    both = (q @ q.mT).unsqueeze(1) @ (k @ k.mT).unsqueeze(0)
    fourth = (both * both.mT).sum((-2, -1)).clamp_min(0.0)
    whole = computed_lengths(q.flatten(1)).unsqueeze(-1) * computed_lengths(k.flatten(1))
    unit = relative_error(2 * q.shape[-1] + 4 * q.shape[1] + 32)
    found = (Upper(fourth) + unit * whole.square().square()).sqrt().sqrt()
    return found.minimum(q_norm.unsqueeze(-1) * k_norm)
