"""One round of the keys forward, and one backward: attention of own queries to the keys of every rank.

Forward, outputs o_b and log-sum-exps l_b of the pieces are joined as the shards come by. Backward, the fused
kernel takes o and l of all keys with each piece, as if these were all that it had seen; where another engine
runs, a piece is computed again with the cotangents that joining gives it, w_b ∂o and w_b (⟨∂o, o_b - o⟩ + ∂l)
for w_b = e^{l_b - l}. The gradients of keys and values travel home with them. One piece is held at a time.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard.compute.engine import Plan
from regard.compute.problem import Problem
from regard.compute.ring.line import Line
from regard.compute.ring.pieces import Attended, Piece, Union, attend_piece, pieces_of, share_of
from regard.compute.ring.travel import Trip
from regard.compute.selection import select

STAYING = ("potential", "normalizer", "support", "queries", "query_marks")
TRAVELING = ("keys", "values", "log_counts", "key_marks")
"""What of a problem belongs to its keys."""
MOVING = ("potential", "normalizer", "queries", "keys", "values", "log_counts")
"""What has a gradient."""


@dataclass(frozen=True)
class Round:
    """A problem on every rank of a group, in which the keys go round.

    group: a weak reference to the process group; lengths: how many keys each rank has; problem: this rank's
    own, with marks.
    """

    group: weakref.ref[Any]
    line: Line
    timeout: float
    problem: Problem
    lengths: tuple[int, ...]

    def leaves(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that stay, and those that travel."""
        staying, traveling = _split(self.problem)
        return staying.tensors, traveling.tensors

    def pieces(self, staying: Sequence[Tensor], traveling: Sequence[Tensor]) -> Iterator[Piece]:
        """Own queries and the keys of one rank, from the tensors of `leaves`, piece by piece."""
        own, keys = _split(self.problem)
        fields = {**own.fields(staying), **keys.fields(traveling)}
        return pieces_of(self.problem.replace(**fields))

    def shapes(self, source: int) -> list[torch.Size]:
        """The shapes of the traveling tensors of another rank."""
        return _traveling_shapes(self.problem, self.lengths[source])

    def trip(self) -> Trip:
        """A round of tensors."""
        return Trip(self.group(), self.line, self.timeout)

    def source(self, step: int) -> int:
        """Whose keys are here after so many steps."""
        return (self.line.rank - step) % self.line.world


def shapes_of_a_token(problem: Problem) -> list[list[int]]:
    """The shapes of the traveling tensors of one token: ranks must agree on these."""
    return [list(shape) for shape in _traveling_shapes(problem, 1)]


def _traveling_shapes(problem: Problem, length: int) -> list[torch.Size]:
    """The shapes of the traveling tensors where a shard has `length` tokens."""
    traveling = _split(problem)[1]
    shapes = []
    for name, tensor in zip(traveling.names, traveling.tensors, strict=True):
        shape = list(tensor.shape)
        shape[-1 if name in ("log_counts", "key_marks") else -2] = length
        shapes.append(torch.Size(shape))
    return shapes


def go_round(one: Round) -> Attended:
    """Outputs (..., m, e) and log-sum-exps (..., m) of own queries over the keys of all ranks."""
    staying, traveling = one.leaves()
    out, level = _Round.apply(one, len(staying), *staying, *traveling)
    return out, level


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Round, count: int, *leaves: Tensor) -> Attended:
        staying, here = leaves[:count], list(leaves[count:])
        trip, union = one.trip(), Union.empty(one.problem)
        for step in range(one.line.world):
            last = step == one.line.world - 1
            coming = None if last else trip.pass_on(here, one.shapes(one.source(step + 1)))
            for piece in one.pieces(staying, here):
                union.add(piece.rows, attend_piece(select(piece.problem)))
            here = here if coming is None else coming.take()
        one.line.end_trip()
        ctx.one, ctx.count = one, count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves, union.out, union.level)
        return union.out, union.level

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_out: Tensor | None, by_level: Tensor | None) -> tuple[Any, ...]:
        *leaves, out, level = ctx.saved_tensors
        one, count = ctx.one, ctx.count
        by_out = torch.zeros_like(out) if by_out is None else by_out
        by_level = torch.zeros_like(level) if by_level is None else by_level
        pull = _Pull(one, out, level, by_out, by_level)
        staying, here = leaves[:count], list(leaves[count:])
        names, others = (part.names for part in _split(one.problem))
        own = [_zeros(name, t, level.dtype) for name, t in zip(names, staying, strict=True)]
        moves = [name in MOVING and t.is_floating_point() for name, t in zip(others, here, strict=True)]
        sums = [torch.zeros_like(t) for t in itertools.compress(here, moves)]
        trip = one.trip()
        for step in range(one.line.world):
            last, after = step == one.line.world - 1, one.shapes(one.source(step + 1))
            coming = None if last else trip.pass_on(here, after)
            for piece in one.pieces(staying, here):
                pull.add(piece, [t for t in own if t is not None] + sums)
            here = here if coming is None else coming.take()
            if one.line.world > 1:
                sums = trip.pass_on(sums, [*itertools.compress(after, moves)]).take()
        one.line.end_trip()
        home = iter(sums)
        found = [None if g is None else g.to(t.dtype) for g, t in zip(own, staying, strict=True)]
        return None, None, *found, *(next(home) if moved else None for moved in moves)


def _zeros(name: str, like: Tensor, least: torch.dtype) -> Tensor | None:
    """Where gradients that stay are added: those of parameters, sums over all pairs, with more digits."""
    if name not in MOVING or not like.is_floating_point():
        return None
    return torch.zeros_like(like, dtype=None if name == "queries" else torch.promote_types(like.dtype, least))


@dataclass(frozen=True)
class _Pull:
    """The gradients that one piece adds."""

    one: Round
    out: Tensor
    level: Tensor
    by_out: Tensor
    by_level: Tensor

    def add(self, piece: Piece, totals: list[Tensor]) -> None:
        """Add those of a piece to the totals of all tensors that have one."""
        every = _take(piece.problem, MOVING)
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in every.tensors]
        with torch.enable_grad():
            pulled = self._pulled(piece.rows, select(piece.problem.replace(**every.fields(leaves))))
        names = [name for name, t in zip(every.names, leaves, strict=True) if t.requires_grad]
        moving = [t for t in leaves if t.requires_grad]
        values, pulls = zip(*pulled, strict=True)
        gradients = torch.autograd.grad(values, moving, pulls, allow_unused=True)
        for name, total, gradient in zip(names, totals, gradients, strict=True):
            if gradient is not None:
                _part_of(name, total, piece).add_(gradient)

    def _pulled(self, rows: slice, plan: Plan) -> list[tuple[Tensor, Tensor]]:
        """Tensors of which the piece is made, with their gradients: of its plan, or what comes out of it."""
        whole, level = self.out[..., rows, :], self.level[..., rows]
        by_out, by_level = self.by_out[..., rows, :], self.by_level[..., rows]
        by_level = by_level.masked_fill(level == -math.inf, 0.0)
        found = plan.pull_part((whole, level), (by_out, by_level))
        if found is not None:
            return found
        out, own = attend_piece(plan)
        share = share_of(own.detach(), level)
        moved = (by_out * (out.detach() - whole)).sum(-1, dtype=level.dtype)
        by_own = share * (moved + by_level)
        pairs = [(out, share.unsqueeze(-1) * by_out), (own, by_own)]
        return [(t, pull.to(t.dtype)) for t, pull in pairs if t.requires_grad]


def _part_of(name: str, total: Tensor, piece: Piece) -> Tensor:
    """What a piece adds to: some queries, some keys, or all of a parameter."""
    if name == "queries":
        return total[..., piece.rows, :]
    if name in ("keys", "values"):
        return total[..., piece.columns, :]
    return total[..., piece.columns] if name == "log_counts" else total


@dataclass(frozen=True)
class _Leaves:
    """Tensors of some fields of a problem, and how to put others in their places."""

    names: list[str]
    tensors: list[Tensor]
    fields: Callable[[Sequence[Tensor]], dict[str, Any]]


def _split(problem: Problem) -> tuple[_Leaves, _Leaves]:
    """The tensors that stay with the queries, and those that travel with the keys."""
    return _take(problem, STAYING), _take(problem, TRAVELING)


def _take(problem: Problem, names: tuple[str, ...]) -> _Leaves:
    trees = {name: pytree.tree_flatten(getattr(problem, name)) for name in names}
    found = [(name, t) for name in names for t in trees[name][0] if isinstance(t, Tensor)]

    def fields(tensors: Sequence[Tensor]) -> dict[str, Any]:
        remaining = iter(tensors)
        return {
            name: pytree.tree_unflatten(
                [next(remaining) if isinstance(t, Tensor) else t for t in every], tree
            )
            for name, (every, tree) in trees.items()
        }

    return _Leaves([name for name, _ in found], [t for _, t in found], fields)
