"""One round of the keys forward, and one backward: attention of own queries to the keys of every rank.

Forward, outputs o_b and log-sum-exps l_b of the shards are joined as the shards come by. Backward, each shard
is computed again with the cotangents that joining gives it, w_b ∂o and w_b (⟨∂o, o_b - o⟩ + ∂l) for
w_b = e^{l_b - l}, and the gradients of keys and values travel home with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard.compute.problem import Problem
from regard.compute.ring.line import Line
from regard.compute.ring.pieces import Attended, attend_shard, join, share_of
from regard.compute.ring.travel import Trip

TRAVELING = ("keys", "values", "log_counts", "key_marks")
"""What of a problem belongs to its keys."""


@dataclass(frozen=True)
class Round:
    """A problem on every rank of a group, in which the keys go round.

    lengths: how many keys each rank has; problem: this rank's own, with marks.
    """

    group: Any
    line: Line
    timeout: float
    problem: Problem
    lengths: tuple[int, ...]

    def leaves(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that stay, and those that travel."""
        staying, traveling = _split(self.problem)
        return staying.tensors, traveling.tensors

    def attend(self, staying: Sequence[Tensor], traveling: Sequence[Tensor]) -> Attended:
        """Own queries and the keys of one rank, from the tensors of `leaves`."""
        own, keys = _split(self.problem)
        fields = {**own.fields(staying), **keys.fields(traveling)}
        return attend_shard(self.problem.replace(**fields))

    def shapes(self, source: int) -> list[torch.Size]:
        """The shapes of the traveling tensors of another rank."""
        return self._resize(_split(self.problem)[1], self.lengths[source])

    def trip(self) -> Trip:
        """A round of tensors."""
        return Trip(self.group, self.line, self.timeout)

    def source(self, step: int) -> int:
        """Whose keys are here after so many steps."""
        return (self.line.rank - step) % self.line.world

    def _resize(self, traveling: _Leaves, length: int) -> list[torch.Size]:
        last = {"log_counts", "key_marks"}
        shapes = []
        for name, tensor in zip(traveling.names, traveling.tensors, strict=True):
            shape = list(tensor.shape)
            shape[-1 if name in last else -2] = length
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
        trip, found = one.trip(), None
        for step in range(one.line.world):
            last = step == one.line.world - 1
            coming = None if last else trip.pass_on(here, one.shapes(one.source(step + 1)))
            part = one.attend(staying, here)
            found = part if found is None else join([found, part])
            here = here if coming is None else coming.take()
        one.line.end_trip()
        assert found is not None
        ctx.one, ctx.count = one, count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves, *found)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_out: Tensor | None, by_level: Tensor | None) -> tuple[Any, ...]:
        *leaves, out, level = ctx.saved_tensors
        one, count = ctx.one, ctx.count
        by_out = torch.zeros_like(out) if by_out is None else by_out
        by_level = torch.zeros_like(level) if by_level is None else by_level
        pull = _Pull(one, tuple(leaves[:count]), out, level, by_out, by_level)
        own = [_zeros(t, out.dtype) if t.is_floating_point() else None for t in leaves[:count]]
        here = list(leaves[count:])
        sums = [torch.zeros_like(t) for t in here if t.is_floating_point()]
        trip = one.trip()
        for step in range(one.line.world):
            last, after = step == one.line.world - 1, one.shapes(one.source(step + 1))
            coming = None if last else trip.pass_on(here, after)
            by_own, by_here = pull(here)
            own = [t if g is None or t is None else t.add_(g) for t, g in zip(own, by_own, strict=True)]
            for total, gradient in zip(sums, by_here, strict=True):
                total.add_(gradient)
            here = here if coming is None else coming.take()
            floating = [shape for t, shape in zip(here, after, strict=True) if t.is_floating_point()]
            sums = trip.pass_on(sums, floating).take() if one.line.world > 1 else sums
        one.line.end_trip()
        gradients = iter(sums)
        home = [next(gradients) if t.is_floating_point() else None for t in here]
        found = [None if g is None else g.to(t.dtype) for g, t in zip(own, leaves, strict=False)]
        return None, None, *found, *home


def _zeros(like: Tensor, least: torch.dtype) -> Tensor:
    """Where gradients that stay are added, with the digits of what is joined."""
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, least))


@dataclass(frozen=True)
class _Pull:
    """The gradients that one shard of keys adds."""

    one: Round
    staying: tuple[Tensor, ...]
    out: Tensor
    level: Tensor
    by_out: Tensor
    by_level: Tensor

    def __call__(self, here: list[Tensor]) -> tuple[list[Tensor | None], list[Tensor]]:
        """Those of the tensors that stay, and those of the floating ones that travel."""
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in (*self.staying, *here)]
        count = len(self.staying)
        with torch.enable_grad():
            out, level = self.one.attend(leaves[:count], leaves[count:])
        every = self._pull(leaves, out, level)
        by_here = [
            torch.zeros_like(t) if g is None else g
            for t, g in zip(leaves[count:], every[count:], strict=True)
            if t.requires_grad
        ]
        return every[:count], by_here

    def _pull(self, leaves: list[Tensor], out: Tensor, level: Tensor) -> list[Tensor | None]:
        """The gradients of the leaves; None of those that neither outputs nor log-sum-exps depend on."""
        cotangents = self._cotangents(out.detach(), level.detach())
        both = [(f, c) for f, c in zip((out, level), cotangents, strict=True) if f.requires_grad]
        if not both:  # none of these keys is seen
            return [None] * len(leaves)
        values, pulls = zip(*both, strict=True)
        moving = [t for t in leaves if t.requires_grad]
        found = iter(torch.autograd.grad(values, moving, pulls, allow_unused=True))
        return [next(found) if t.requires_grad else None for t in leaves]

    def _cotangents(self, out: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        share = share_of(level, self.level)
        moved = (self.by_out * (out - self.out)).sum(-1)
        by_level = torch.where(self.level == -math.inf, torch.zeros_like(moved), self.by_level)
        return share.unsqueeze(-1) * self.by_out, share * (moved + by_level)


@dataclass(frozen=True)
class _Leaves:
    """Tensors of some fields of a problem, and how to put others in their places."""

    names: list[str]
    tensors: list[Tensor]
    fields: Callable[[Sequence[Tensor]], dict[str, Any]]


def _split(problem: Problem) -> tuple[_Leaves, _Leaves]:
    """The tensors that stay with the queries, and those that travel with the keys."""
    staying = ("potential", "normalizer", "support", "queries", "query_marks")
    return _take(problem, staying), _take(problem, TRAVELING)


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
