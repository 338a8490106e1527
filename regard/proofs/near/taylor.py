"""The Taylor model: through a network carry the exact derivative from the input, and from every place where a
remainder arose to here.

A state says x' = x + Σ_c B_c d_c with |d_c,j| ≤ ρ_c,j: the first column is the move of the input, the others
are remainders of earlier maps. A map multiplies every column by its exact derivative and adds a column for
its own remainder. A tangent goes the same way, with what the derivative may change in place of remainders.
Norms are never multiplied across layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard import maps
from regard._enclosed import computed_lengths, spectral_norms
from regard._upper import Upper, exact, total
from regard.nonexpansive import Reflected
from regard.norms import Frobenius, SequenceNorm, TokenSum
from regard.proofs.locating import summands
from regard.proofs.near.linear import column_reach
from regard.proofs.near.stages import Stage, group_feed_forward, stage
from regard.proofs.question import once
from regard.proofs.rewriting import as_residual
from regard.proofs.theorem import Refusal

NUMBERS = 60_000_000
"""How many numbers the derivatives of all columns may hold; beyond it, old remainders are merged into one."""
SMALL = 64
"""Up to how many entries of a sequence what became of it is kept for the rest of a question."""
ROUNDING = Upper(1e-11)
"""What float64 may lose in values and products, relative to their sizes: assumed,
and added to every remainder.
"""


@dataclass(frozen=True)
class Column:
    """∂x_i/∂d_j (n, m, d, c) of one origin whose m tokens move by at most `radii` (m,).

    Columns of the same origin share that object.
    """

    blocks: Tensor
    radii: Upper

    def plus(self, other: Column | None) -> Column:
        """The sum with a column of the same origin."""
        return self if other is None else Column(self.blocks + other.blocks, self.radii)

    @property
    def bounded(self) -> bool:
        """Whether something is known of its radii."""
        return bool(torch.isfinite(self.radii.value).all())

    def size(self) -> Upper:
        """Σ_j |B_ij|_F ρ_j for each token i, no less than the reach."""
        return self._size

    @cached_property
    def _size(self) -> Upper:
        if not self.bounded:
            return Upper(torch.full((len(self.blocks),), math.inf, dtype=torch.float64))
        return (computed_lengths(self.blocks.flatten(-2)) * self.radii).sum(-1)

    def reach(self, steps: int = 0) -> Upper:
        """At least |Σ_j B_ij d_j| for each token i, by (N18)."""
        return self._reach(steps) if steps else self._plain_reach

    @cached_property
    def _plain_reach(self) -> Upper:
        return self._reach(0)

    def _reach(self, steps: int) -> Upper:
        moving = self.radii.value > 0
        if not bool(moving.any()):
            return exact(torch.zeros(len(self.blocks), dtype=torch.float64))
        if not self.bounded:
            return Upper(torch.full((len(self.blocks),), math.inf, dtype=torch.float64))
        return column_reach(self.blocks[:, moving], self.radii[moving], steps) * (1 + ROUNDING)


@dataclass(frozen=True)
class State:
    """Tokens after some maps: their values for the given input, columns, and `cap` (n,): no token is
    farther than this from its value.
    """

    value: Tensor
    columns: tuple[Column, ...]
    cap: Upper

    def moves(self) -> Upper:
        """At least how far each token is from its value."""
        return total_reach(self.columns).minimum(self.cap)

    def remainder(self) -> Upper:
        """The part of the moves that is not linear in the input."""
        nothing = exact(torch.zeros(len(self.value), dtype=torch.float64))
        return total([nothing, *(column.reach() for column in self.columns[1:])])

    def deviation(self, norm: SequenceNorm) -> Upper:
        """At least the norm of x' - x: in Frobenius norm the move of one token is measured for all rows
        together.
        """
        each = norm_of_rows(norm, self.moves())
        first = self.columns[0]
        if not isinstance(norm, Frobenius) or len(first.radii.value) != 1:
            return each
        linear = spectral_norms(first.blocks[:, 0].flatten(0, 1)) * first.radii[0] * (1 + ROUNDING)
        return each.minimum(
            total([linear, *(norm_of_rows(norm, column.reach()) for column in self.columns[1:])])
        )


def norm_of_rows(norm: SequenceNorm, moves: Upper) -> Upper:
    """At least the norm of a sequence whose tokens have lengths of at most `moves` (n,)."""
    if isinstance(norm, Frobenius):
        return moves.norm()
    return moves.sum() if isinstance(norm, TokenSum) else moves.amax()  # an entry is no larger than its token


def fresh(n: int, width: int, radii: Upper) -> Column:
    """A column that starts here."""
    eye = torch.eye(n, dtype=torch.float64)[:, :, None, None] * torch.eye(width, dtype=torch.float64)
    return Column(eye, radii)


def start(points: Tensor, radii: Tensor) -> State:
    """The input itself; only tokens that move have columns."""
    key = ("start", points.shape, *points.flatten().tolist(), *radii.tolist())
    return once(key, None, lambda: _start(points, radii)) if _is_small(points) else _start(points, radii)


def _start(points: Tensor, radii: Tensor) -> State:
    n, d = points.shape
    moving, moves = radii > 0, exact(radii)
    column = fresh(n, d, moves)
    return State(points, (Column(column.blocks[:, moving], moves[moving]),), moves)


def step(map: object, state: State) -> State:
    """The state after a map."""
    return _run(map, state, None)[0]


def slopes(map: object, state: State) -> tuple[Column, ...]:
    """The columns of a tangent |e_j| ≤ 1 after a map, anywhere within the moves of a state."""
    found = _run(map, state, once(("tangents", id(state)), state, lambda: _tangents(state)))[1]
    assert found is not None
    return found


def _tangents(state: State) -> tuple[Column, ...]:
    n, d = state.value.shape
    return (fresh(n, d, exact(torch.ones(n, dtype=torch.float64))),)


Tangents = tuple[Column, ...] | None


def _run(map: object, state: State, tangents: Tangents) -> tuple[State, Tangents]:
    """A state and a tangent after a map. Maps inside others meet the same states, and are answered once."""
    if not _is_small(state.value):
        return _run_anew(map, state, tangents)
    key, about = (id(map), id(state)), (map, state, tangents)
    if tangents is None:
        return once(("after", *key), about, lambda: _run_anew(map, state, None)[0]), None
    after, turned = once(("turned", *key, id(tangents)), about, lambda: _run_anew(map, state, tangents))
    return once(("after", *key), about, lambda: after), turned


def _is_small(points: Tensor) -> bool:
    return points.numel() <= SMALL


def _run_anew(map: object, state: State, tangents: Tangents) -> tuple[State, Tangents]:
    if isinstance(map, maps.Compose):
        inside = map.maps
        for inner in once(("grouped", id(map)), map, lambda: group_feed_forward(inside)):
            state, tangents = _run(inner, state, tangents)
        return state, tangents
    if isinstance(map, maps.Residual):
        after, turned = _run(map.map, state, tangents)
        return _around(state, after), None if tangents is None or turned is None else _add_columns(
            [tangents, turned]
        )
    if isinstance(map, Reflected):
        return _run(as_residual(map, state.value.shape[-1]), state, tangents)
    if isinstance(map, maps.Added):
        added = map
        parts = once(("summands", id(map)), map, lambda: summands(added))
        return _add([_run(part, state, tangents) for part in parts])
    found = once(("stage", id(map), id(state)), (map, state), lambda: _stage(map, state))
    after = _after(found, state.columns)
    return after, None if tangents is None else _turn(found, tangents)


def _stage(map: object, state: State) -> Stage:
    moves = state.moves().bound
    if bool(torch.isinf(moves).any()):
        raise Refusal("its remainders leave the range of numbers on this domain; use a smaller radius")
    return stage.one(map, state.value, moves)


def _push(found: Stage, columns: tuple[Column, ...]) -> tuple[Column, ...]:
    return tuple(Column(found.push(column.blocks), column.radii) for column in columns)


def _turn(found: Stage, tangents: tuple[Column, ...]) -> tuple[Column, ...]:
    """A tangent after a map: through the derivative at the center, and what the derivative may be more."""
    n, d = found.value.shape
    reach = total_reach(tangents)
    change = found.change(reach).firm() + ROUNDING * reach + _lost(found, tangents)
    return _merge((*_push(found, tangents), fresh(n, d, change)))


def _around(state: State, after: State) -> State:
    """A residual connection."""
    if after.value.shape != state.value.shape:
        raise Refusal("a residual connection around a map that changes the width")
    return State(
        state.value + after.value, _add_columns([state.columns, after.columns]), state.cap + after.cap
    )


def _add(found: list[tuple[State, Tangents]]) -> tuple[State, Tangents]:
    """A sum of maps of one state: columns of the same origin add with their directions."""
    values, columns, caps = zip(*((state.value, state.columns, state.cap) for state, _ in found), strict=True)
    if len({value.shape for value in values}) > 1:
        raise Refusal("a sum of maps that give tokens of different widths")
    turned = [tangents for _, tangents in found if tangents is not None]
    state = State(sum(values[1:], values[0]), _add_columns(list(columns)), total(caps))
    return state, _add_columns(turned) if turned else None


def _add_columns(parts: list[tuple[Column, ...]]) -> tuple[Column, ...]:
    """The sum, with a column for its rounding: what cancels leaves the rounding of what it was."""
    n, _, d, _ = parts[0][0].blocks.shape
    joined = parts[0]
    for part in parts[1:]:
        joined = _join(joined, part)
    lost = total([column.size() for part in parts for column in part])
    return _merge((*joined, fresh(n, d, ROUNDING * lost)))


def _join(before: tuple[Column, ...], after: tuple[Column, ...]) -> tuple[Column, ...]:
    """Sums of columns of the same origin.

    One from before that was merged inside goes on alone; what became of it is in the merged one.
    """
    inside = {id(column.radii): column for column in after}
    known = tuple(column.plus(inside.pop(id(column.radii), None)) for column in before)
    return _merge(known + tuple(inside.values()))


def _merge(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """The same with fewer numbers: all remainders as one, per token."""
    if sum(column.blocks.numel() for column in columns) <= NUMBERS or len(columns) <= 2:
        return columns
    n, _, d, _ = columns[0].blocks.shape
    return columns[0], fresh(n, d, total_reach(columns[1:]))


def total_reach(columns: tuple[Column, ...]) -> Upper:
    """At least the length of the sum of columns, for each token."""
    return total([column.reach() for column in columns])


def _lost(found: Stage, columns: tuple[Column, ...]) -> Upper:
    """What rounding hides when columns go through a map, relative to what their products are made of."""
    return total([found.lost(column.size()) for column in columns])


def _after(found: Stage, before: tuple[Column, ...]) -> State:
    """The state after a map. Its remainder is never more than the cap and the linear part together."""
    n, d = found.value.shape
    columns = _push(found, before)
    rounding = ROUNDING * computed_lengths(found.value) + found.blur
    hidden = _lost(found, before)
    known = found.remainder.firm().minimum(found.cap + total_reach(columns)) + rounding + hidden
    return State(found.value, _merge((*columns, fresh(n, d, known))), found.cap + rounding)
