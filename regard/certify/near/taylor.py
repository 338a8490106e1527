"""The Taylor model: through a network carry the exact derivative from the input, and from every place where a remainder arose to here.

A state says x' = x + Σ_c B_c d_c with |d_c,j| ≤ ρ_c,j: the first column is the move of the input, the others are remainders of earlier
maps. A map multiplies every column by its exact derivative and adds a column for its own remainder. A tangent goes the same way, with
what the derivative may change in place of remainders. Norms are never multiplied across layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import maps
from regard.certify.locating import summands
from regard.certify.near.linear import shares
from regard.certify.near.matrix_norms import MARGIN, largest_root, matrix_norms
from regard.certify.near.stages import Stage, grouped, stage
from regard.certify.theorem import Refusal
from regard.norms import Frobenius, SequenceNorm

NUMBERS = 60_000_000
"""How many numbers the derivatives of all columns may hold; beyond it, old remainders are merged into one."""
ROUNDING = 1e-11
"""What float64 may lose in values and products, relative to their sizes; added to every remainder."""


@dataclass(frozen=True)
class Column:
    """∂x_i/∂d_j (n, m, d, c) of one origin whose m tokens move by at most `radii` (m,). Columns of the same origin share that tensor."""

    blocks: Tensor
    radii: Tensor

    def plus(self, other: Column | None) -> Column:
        """The sum with a column of the same origin."""
        return self if other is None else Column(self.blocks + other.blocks, self.radii)

    def size(self) -> Tensor:
        """Σ_j |B_ij|_F ρ_j for each token i, no less than the reach."""
        if not bool(torch.isfinite(self.radii).all()):
            return torch.full((len(self.blocks),), math.inf, dtype=torch.float64)
        return self.blocks.flatten(-2).norm(dim=-1) @ self.radii

    def reach(self, steps: int = 0) -> Tensor:
        """At least |Σ_j B_ij d_j| for each token i: λ_max(Σ_j ρ_j² B_ij B_ijᵀ/λ_j)^{1/2} λ in proportion to the blocks, or better."""
        moving = self.radii > 0
        if not bool(moving.any()):
            return torch.zeros(len(self.blocks), dtype=torch.float64)
        if not bool(torch.isfinite(self.radii).all()):
            return torch.full((len(self.blocks),), math.inf, dtype=torch.float64)
        scaled = self.blocks[:, moving] * self.radii[moving][None, :, None, None]
        sizes = scaled.flatten(-2).norm(dim=-1).clamp_min(1e-300)
        share = (shares(scaled, steps) if steps else sizes / sizes.sum(-1, keepdim=True)).sqrt()
        wide = (scaled / share[..., None, None]).transpose(1, 2).flatten(-2)
        gram = wide @ wide.mT if wide.shape[-2] <= wide.shape[-1] else wide.mT @ wide
        return torch.minimum(largest_root(gram, max(wide.shape[-2:])), sizes.sum(-1)) * (MARGIN + ROUNDING)


@dataclass(frozen=True)
class State:
    """Tokens after some maps: their values for the given input, columns, and `cap` (n,): no token is farther than this from its value."""

    value: Tensor
    columns: tuple[Column, ...]
    cap: Tensor

    def moves(self) -> Tensor:
        """At least how far each token is from its value."""
        total = sum((column.reach() for column in self.columns), torch.zeros(len(self.value), dtype=torch.float64))
        return torch.minimum(total, self.cap) * MARGIN

    def remainder(self) -> Tensor:
        """The part of the moves that is not linear in the input."""
        return sum((column.reach() for column in self.columns[1:]), torch.zeros(len(self.value), dtype=torch.float64))

    def deviation(self, norm: SequenceNorm) -> float:
        """At least the norm of x' - x: in Frobenius norm the move of one token is measured for all rows together."""
        each = float(norm.of(self.moves().unsqueeze(-1)))
        first = self.columns[0]
        if not isinstance(norm, Frobenius) or len(first.radii) != 1:
            return each
        stacked = first.blocks[:, 0].flatten(0, 1)
        linear = float(matrix_norms(stacked)) * float(first.radii[0]) * (1 + ROUNDING)
        beyond = sum(float(norm.of(column.reach().unsqueeze(-1))) for column in self.columns[1:])
        return min(each, (linear + beyond) * MARGIN)


def fresh(n: int, width: int, radii: Tensor) -> Column:
    """A column that starts here."""
    eye = torch.eye(n, dtype=torch.float64)[:, :, None, None] * torch.eye(width, dtype=torch.float64)
    return Column(eye, radii)


def start(points: Tensor, radii: Tensor) -> State:
    """The input itself; only tokens that move have columns."""
    n, d = points.shape
    moving = radii > 0
    column = fresh(n, d, radii)
    return State(points, (Column(column.blocks[:, moving], radii[moving]),), radii)


def step(map: object, state: State) -> State:
    """The state after a map."""
    return _run(map, state, None)[0]


def slopes(map: object, state: State) -> tuple[Column, ...]:
    """The columns of a tangent |e_j| ≤ 1 after a map, anywhere within the moves of a state."""
    n, d = state.value.shape
    found = _run(map, state, (fresh(n, d, torch.ones(n, dtype=torch.float64)),))[1]
    assert found is not None
    return found


Tangents = tuple[Column, ...] | None


def _run(map: object, state: State, tangents: Tangents) -> tuple[State, Tangents]:
    if isinstance(map, maps.Compose):
        for inner in grouped(map.maps):
            state, tangents = _run(inner, state, tangents)
        return state, tangents
    if isinstance(map, maps.Residual):
        after, turned = _run(map.map, state, tangents)
        return _around(state, after), None if tangents is None or turned is None else _total([tangents, turned])
    if isinstance(map, maps.Added):
        return _added([_run(part, state, tangents) for part in summands(map)])
    moves = state.moves()
    if bool(torch.isinf(moves).any()):
        raise Refusal("the moves before a map are not bounded")
    found = stage.one(map, state.value, moves)
    after = _after(found.value, _pushed(found, state.columns), found.remainder, found.cap)
    return after, None if tangents is None else _turned(found, tangents)


def _pushed(found: Stage, columns: tuple[Column, ...]) -> tuple[Column, ...]:
    return tuple(Column(found.push(column.blocks), column.radii) for column in columns)


def _turned(found: Stage, tangents: tuple[Column, ...]) -> tuple[Column, ...]:
    """A tangent after a map: through the derivative at the center, and what the derivative may be more."""
    n, d = found.value.shape
    reach = total_reach(tangents)
    change = torch.nan_to_num(found.change(reach), nan=math.inf, posinf=math.inf) + ROUNDING * reach
    return _merged((*_pushed(found, tangents), fresh(n, d, change)))


def _around(state: State, after: State) -> State:
    """A residual connection."""
    if after.value.shape != state.value.shape:
        raise Refusal("a residual connection around a map that changes the width")
    return State(state.value + after.value, _total([state.columns, after.columns]), state.cap + after.cap)


def _added(found: list[tuple[State, Tangents]]) -> tuple[State, Tangents]:
    """A sum of maps of one state: columns of the same origin add with their directions."""
    values, columns, caps = zip(*((state.value, state.columns, state.cap) for state, _ in found), strict=True)
    if len({value.shape for value in values}) > 1:
        raise Refusal("a sum of maps that give tokens of different widths")
    turned = [tangents for _, tangents in found if tangents is not None]
    return State(sum(values[1:], values[0]), _total(list(columns)), sum(caps[1:], caps[0])), _total(turned) if turned else None


def _total(parts: list[tuple[Column, ...]]) -> tuple[Column, ...]:
    """The sum, with a column for its rounding: what cancels leaves the rounding of what it was."""
    n, _, d, _ = parts[0][0].blocks.shape
    joined = parts[0]
    for part in parts[1:]:
        joined = _joined(joined, part)
    lost = sum((column.size() for part in parts for column in part), torch.zeros(n, dtype=torch.float64))
    return _merged((*joined, fresh(n, d, ROUNDING * lost)))


def _joined(before: tuple[Column, ...], after: tuple[Column, ...]) -> tuple[Column, ...]:
    """Sums of columns of the same origin. One from before that was merged inside goes on alone; what became of it is in the merged one."""
    inside = {id(column.radii): column for column in after}
    known = tuple(column.plus(inside.pop(id(column.radii), None)) for column in before)
    return _merged(known + tuple(inside.values()))


def _merged(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """The same with fewer numbers: all remainders as one, per token."""
    if sum(column.blocks.numel() for column in columns) <= NUMBERS or len(columns) <= 2:
        return columns
    n, _, d, _ = columns[0].blocks.shape
    return columns[0], fresh(n, d, total_reach(columns[1:]))


def total_reach(columns: tuple[Column, ...]) -> Tensor:
    """At least the length of the sum of columns, for each token."""
    total = columns[0].reach()
    for column in columns[1:]:
        total = total + column.reach()
    return total


def _after(value: Tensor, columns: tuple[Column, ...], remainder: Tensor, cap: Tensor) -> State:
    """The state after a map with this remainder, which is never more than the cap and the linear part together."""
    n, d = value.shape
    rounding = ROUNDING * (value.norm(dim=-1) + 1e-300)
    known = torch.minimum(torch.nan_to_num(remainder, nan=math.inf, posinf=math.inf), cap + total_reach(columns)) + rounding
    return State(value, _merged((*columns, fresh(n, d, known))), cap + rounding)
