"""Attention block by block in plain torch: any potential, any normalizer, O(n) memory for every derivative.

`attend_online` is softmax with running sums over blocks of keys; its derivatives need outputs and
log-sum-exps. `map_rows` holds whole rows, for normalizers that need them, and computes them again for each
derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._object import Object
from regard._transforms import batches_gradients, forward_rule, push
from regard._types import Features
from regard.compute.kernel.products import covariance
from regard.compute.kernel.sweep import (
    KEY,
    QUERY,
    SHARED,
    Give,
    Sweep,
    Take,
    is_mapped,
    map_one_by_one,
    move_to_front,
    places_of,
    substitute,
    sum_blocks,
    sum_tiles,
)
from regard.compute.kernel.tiles import Tile, Tiling
from regard.normalizers import Normalizer, Reference, Softmax
from regard.potentials import Potential

_HOLE = object()
ROLES = (SHARED, SHARED, QUERY, KEY, KEY, KEY)


@dataclass(frozen=True, eq=False, repr=False)
class Parts(Object):
    """What blocks are computed from.

    What is decided here: the potential and features that give the scores fastest, and the dtype.

    queries: tensors (..., m, ·); keys and values: tensors (..., n, ·); log_counts (..., n, 1).
    """

    potential: Potential
    normalizer: Normalizer
    queries: Features
    keys: Features
    log_counts: Tensor | None
    values: Tensor

    def scores(self, allowed: Tensor | None) -> Tensor:
        """Scores over temperature, plus log-counts, -inf outside the support: what softmax exponentiates."""
        assert isinstance(self.normalizer, Softmax)
        return self.reference(allowed).counted(
            self.normalizer.divide_by_temperature(self.potential.pair(self.queries, self.keys))
        )

    def reference(self, allowed: Tensor | None) -> Reference:
        """The reference measure of the block's rows."""
        return Reference(None if self.log_counts is None else self.log_counts.squeeze(-1), allowed)


BlockFunction = Callable[[Parts, Tensor | None], Tensor]
"""The rows (..., rows, ·) of a block, or a contribution that is summed over blocks."""


@dataclass(frozen=True)
class Layout:
    """How the tensors of Parts lie in a flat list, and which of them are cut by rows or by columns."""

    tree: Any
    template: tuple[Any, ...]
    roles: tuple[str, ...]

    @staticmethod
    def of(parts: Parts) -> tuple[Layout, list[Tensor]]:
        """The layout and the list."""
        leaves, tree = pytree.tree_flatten(parts)
        fields = (
            parts.potential,
            parts.normalizer,
            parts.queries,
            parts.keys,
            parts.log_counts,
            parts.values,
        )
        roles = tuple(
            role
            for role, field in zip(ROLES, fields, strict=True)
            for leaf in pytree.tree_leaves(field)
            if isinstance(leaf, Tensor)
        )
        template = tuple(_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return Layout(tree, template, roles), [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def takes(self) -> tuple[Take, ...]:
        """How a sweep cuts the list."""
        return tuple(Take(role) for role in self.roles)

    def parts(self, leaves: Sequence[Tensor]) -> Parts:
        """Parts again."""
        remaining = iter(leaves)
        every = [next(remaining) if leaf is _HOLE else leaf for leaf in self.template]
        return pytree.tree_unflatten(every, self.tree)


def can_split_batch(parts: Parts, batch: torch.Size) -> bool:
    """Whether a block can be taken from one element of the batch: no parameter differs between elements."""
    if batch.numel() <= 1:
        return False
    layout, leaves = Layout.of(parts)
    tile = Tile(slice(0, 1), slice(0, 1), (0,) * len(batch))
    with torch.no_grad():
        one = layout.parts([take.view(leaf, tile) for take, leaf in zip(layout.takes(), leaves, strict=True)])
        return one.potential.pair(one.queries, one.keys).ndim == 2 and all(
            t.ndim == 0 for t in pytree.tree_leaves(one.normalizer)
        )


def map_rows(function: BlockFunction, parts: Parts, tiling: Tiling, summed: bool = False) -> Tensor:
    """`function` of whole rows, block by block: rows (..., m, ·); or, summed, columns (..., n, ·)."""
    layout, leaves = Layout.of(parts)
    sweep = Sweep(
        lambda tiling, tile, some: (function(layout.parts(some), tiling.allowed(tile)),),
        layout.takes(),
        (Give(KEY if summed else QUERY),),
    )
    return sum_blocks(sweep, tiling, leaves)[0]


def attend_online(parts: Parts, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """Softmax attention (..., m, e) and log-sum-exps (..., m)."""
    layout, leaves = Layout.of(parts)
    out, lse = _Online.apply(Online(layout), tiling, *leaves)
    return out, lse.squeeze(-1)


def pull_online(
    parts: Parts, tiling: Tiling, whole: tuple[Tensor, Tensor], cotangents: tuple[Tensor, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """The tensors of some keys with their gradients, from outputs (..., m, e) and log-sum-exps (..., m) of
    all keys and the cotangents of these.
    """
    layout, leaves = Layout.of(parts)
    wanted = places_of([leaf.requires_grad for leaf in leaves])
    (out, lse), (by_out, by_lse) = whole, cotangents
    level = (by_out * out).sum(-1, dtype=lse.dtype) - by_lse
    rows = [t.to(parts.values.dtype) for t in (by_out, level.unsqueeze(-1), _finite(lse).unsqueeze(-1))]
    with torch.no_grad():
        found = sum_blocks(Online(layout).pull(leaves, wanted), tiling, [*leaves, *rows])
    return [(leaves[place], gradient) for place, gradient in zip(wanted, found, strict=True)]


@dataclass(frozen=True)
class Online:
    """The sweeps of softmax attention over a layout: its value, its reverse and its forward derivative.

    lead: the sizes of the dimensions that vmap put in front.
    """

    layout: Layout
    lead: tuple[int, ...] = ()

    def value(self) -> Sweep:
        """Outputs and log-sum-exps (..., m, 1) of whole rows."""
        return self._batch(Sweep(self._merge, self.layout.takes(), (Give(QUERY), Give(QUERY))))

    def pull(self, leaves: Sequence[Tensor], wanted: tuple[int, ...]) -> Sweep:
        """The reverse derivative: gradients of the leaves `wanted`.

        It takes the leaves, cotangents ∂o of the outputs, levels ⟨∂o, o⟩ - ∂lse, and log-sum-exps.
        """
        layout, count = self.layout, len(self.layout.roles)

        def block(tiling: Tiling, tile: Tile, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            leaves, (by_out, level, lse) = arguments[:count], arguments[count:]
            moving = tuple(index for index in wanted if index != count - 1)
            scores, pull = torch.func.vjp(
                lambda *m: self._scores(substitute(leaves, moving, m), tiling, tile),
                *(leaves[i] for i in moving),
            )[:2]
            weights = (scores - lse).exp()
            by_scores = weights * (by_out @ leaves[-1].mT - level)
            gradients = list(
                pull(by_scores.sum_to_size(scores.shape))
            )  # the values may have batch dimensions that the scores lack
            if count - 1 in wanted:
                gradients.append((weights.mT @ by_out).sum_to_size(leaves[-1].shape))
            return tuple(gradients)

        gives = (Give(layout.roles[i], i) for i in wanted)
        return self._batch(Sweep(block, (*layout.takes(), *(Take(QUERY),) * 3), tuple(gives)))

    def push(self, moving: tuple[int, ...]) -> Sweep:
        """The forward derivative: tangents of the outputs and of the log-sum-exps, in blocks of whole rows.

        It takes the leaves, log-sum-exps, and tangents of the leaves `moving`.
        """
        layout, count = self.layout, len(self.layout.roles)

        def block(tiling: Tiling, tile: Tile, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            leaves, lse, tangents = (
                arguments[:count],
                arguments[count],
                dict(zip(moving, arguments[count + 1 :], strict=True)),
            )
            by_values = tangents.pop(count - 1, None)
            if not tangents:
                weights = (self._scores(leaves, tiling, tile) - lse).exp()
                assert by_values is not None
                return weights @ by_values, torch.zeros_like(lse)
            places = tuple(tangents)
            some, changes = tuple(leaves[index] for index in places), tuple(tangents.values())
            scores, change = push(
                lambda *m: self._scores(substitute(leaves, places, m), tiling, tile), some, changes
            )
            return covariance((scores - lse).exp(), change, leaves[-1], by_values)

        takes = (*layout.takes(), Take(QUERY), *(Take(layout.roles[i]) for i in moving))
        return self._batch(Sweep(block, takes, (Give(QUERY), Give(QUERY))))

    def _scores(self, leaves: Sequence[Tensor], tiling: Tiling, tile: Tile) -> Tensor:
        return self.layout.parts(leaves).scores(tiling.allowed(tile))

    def _batch(self, sweep: Sweep) -> Sweep:
        for size in self.lead:
            sweep = sweep.batch(size, (True,) * len(sweep.takes))
        return sweep

    def _merge(self, tiling: Tiling, tile: Tile, leaves: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Attention over a union of key sets is the average of the parts, weighted by their masses."""
        total: Tensor | None = None
        for block in tiling.cut(tile):
            own = slice(block.columns.start - tile.columns.start, block.columns.stop - tile.columns.start)
            some = [
                leaf[..., own, :] if role == KEY else leaf
                for leaf, role in zip(leaves, self.layout.roles, strict=True)
            ]
            scores = self._scores(some, tiling, block)
            top = scores.amax(-1, keepdim=True)
            weights = (scores - _finite(top)).exp_()
            out, mass = weights @ some[-1], weights.sum(-1, keepdim=True)
            if total is None:
                total, total_mass, highest = out, mass, top
                continue
            new = torch.maximum(highest, top)  # -inf as long as nothing was seen: such a part has no say
            old_share, new_share = (highest - _finite(new)).exp(), (top - _finite(new)).exp()
            total, total_mass, highest = (
                total * old_share + out * new_share,
                total_mass * old_share + mass * new_share,
                new,
            )
        assert total is not None
        seen = total_mass != 0  # NaN counts as seen: it must reach the output
        out = torch.where(
            seen, total / torch.where(seen, total_mass, torch.ones_like(total_mass)), torch.zeros_like(total)
        )
        return out, (highest + total_mass.log()).expand(*out.shape[:-1], 1)


class _Online(torch.autograd.Function):
    @staticmethod
    def forward(online: Online, tiling: Tiling, *leaves: Tensor) -> tuple[Tensor, ...]:
        return sum_tiles(online.value(), tiling, leaves, tiling)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.online, ctx.tiling, *leaves = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *leaves)
        ctx.save_for_forward(*output, *leaves)

    @staticmethod
    @batches_gradients
    def backward(ctx: Any, by_out: Tensor | None, by_lse: Tensor | None) -> tuple[Any, ...]:
        out, lse, *leaves = ctx.saved_tensors
        wanted = places_of(ctx.needs_input_grad[2:])
        gradients: list[Any] = [None] * len(ctx.needs_input_grad)
        if not wanted or (by_out is None and by_lse is None):
            return tuple(gradients)
        by_out = torch.zeros_like(out) if by_out is None else by_out
        level = (by_out * out).sum(-1, keepdim=True)
        level = level if by_lse is None else level - by_lse
        found = sum_blocks(
            ctx.online.pull(leaves, wanted), ctx.tiling, [*leaves, by_out, level, _finite(lse)]
        )
        for index, gradient in zip(wanted, found, strict=True):
            gradients[2 + index] = gradient
        return tuple(gradients)

    @staticmethod
    @batches_gradients
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        moving = places_of([t is not None for t in tangents[2:]])
        with forward_rule(ctx) as (_, lse, *leaves):
            return sum_blocks(
                ctx.online.push(moving),
                ctx.tiling.whole_rows(),
                [*leaves, _finite(lse), *(t for t in tangents[2:] if t is not None)],
            )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], online: Online, tiling: Tiling, *leaves: Tensor
    ) -> tuple[tuple[Tensor, ...], Any]:
        if is_mapped(tiling, in_dims[1]):
            return map_one_by_one(_Online, info.batch_size, in_dims, (online, tiling, *leaves))
        every = [
            move_to_front(leaf, dim, info.batch_size) for leaf, dim in zip(leaves, in_dims[2:], strict=True)
        ]
        lead = (*online.lead, info.batch_size)
        return _Online.apply(Online(online.layout, lead), tiling.fewer_rows(info.batch_size), *every), (0, 0)


def _finite(level: Tensor) -> Tensor:
    return torch.where(level == -math.inf, torch.zeros_like(level), level)
