"""Scores in blocks, for everything the fused kernel cannot do: any potential, any normalizer, O(n) memory both ways.

`online` is softmax with running sums over blocks of keys and a backward pass that needs only the outputs and the
log-sum-exps. `by_rows` holds whole rows, for normalizers that need them, and computes them again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._object import Object
from regard._types import Features
from regard.compute.tiles import Tile, Tiling, at
from regard.normalizers import Normalizer, Reference, Softmax
from regard.normalizers.base import without_empty_rows, zero_where
from regard.potentials import Potential

_HOLE = object()
ROLES = ("shared", "shared", "query", "key", "key", "key")


@dataclass(frozen=True, eq=False, repr=False)
class Parts(Object):
    """What a block is computed from. queries: leaves (..., m, ·); keys, log_counts (..., n, 1) and values: leaves (..., n, ·)."""

    potential: Potential
    normalizer: Normalizer
    queries: Features
    keys: Features
    log_counts: Tensor | None
    values: Tensor

    def scores(self, allowed: Tensor | None) -> Tensor:
        """Scores over temperature, plus log-counts, -inf outside the support: what softmax exponentiates."""
        assert isinstance(self.normalizer, Softmax)
        return self.reference(allowed).counted(self.normalizer.tempered(self.potential.pair(self.queries, self.keys)))

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
        fields = (parts.potential, parts.normalizer, parts.queries, parts.keys, parts.log_counts, parts.values)
        roles = tuple(
            role for role, field in zip(ROLES, fields, strict=True) for leaf in pytree.tree_leaves(field) if isinstance(leaf, Tensor)
        )
        template = tuple(_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return Layout(tree, template, roles), [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def cut(self, leaves: list[Tensor], tile: Tile) -> list[Tensor]:
        """The leaves of one block, as views."""
        return [self._view(leaf, role, tile) for leaf, role in zip(leaves, self.roles, strict=True)]

    def parts(self, leaves: list[Tensor]) -> Parts:
        """Parts again."""
        remaining = iter(leaves)
        filled = [next(remaining) if leaf is _HOLE else leaf for leaf in self.template]
        return pytree.tree_unflatten(filled, self.tree)

    def add(self, totals: list[Tensor | None], gradients: Iterator[Tensor | None], tile: Tile) -> None:
        """Add the gradients of one block where they belong."""
        for total, gradient, role in zip(totals, gradients, self.roles, strict=True):
            if total is not None and gradient is not None:
                self._view(total, role, tile).add_(gradient)

    @staticmethod
    def _view(leaf: Tensor, role: str, tile: Tile) -> Tensor:
        if role == "shared":
            return leaf
        return at(leaf, tile.batch)[..., tile.rows if role == "query" else tile.columns, :]


def online(parts: Parts, tiling: Tiling, columns: int) -> tuple[Tensor, Tensor]:
    """Softmax attention and log-sum-exps (..., m); keys are taken `columns` at a time."""
    layout, leaves = Layout.of(parts)
    return _Online.apply(layout, tiling, columns, *leaves)


def splits(parts: Parts, batch: torch.Size) -> bool:
    """Whether blocks can be taken from one element of the batch: no parameter of the potential may differ between elements."""
    if batch.numel() <= 1:
        return False
    layout, leaves = Layout.of(parts)
    with torch.no_grad():
        one = layout.parts(layout.cut(leaves, Tile(slice(0, 1), slice(0, 1), (0,) * len(batch))))
        return one.potential.pair(one.queries, one.keys).ndim == 2 and all(t.ndim == 0 for t in pytree.tree_leaves(one.normalizer))


def by_rows(function: BlockFunction, parts: Parts, tiling: Tiling, summed: bool = False) -> Tensor:
    """`function` on whole rows, block by block; the results are stacked along -2, or summed."""
    layout, leaves = Layout.of(parts)
    return _ByRows.apply(function, layout, tiling, summed, *leaves)


class _Online(torch.autograd.Function):
    @staticmethod
    def forward(layout: Layout, tiling: Tiling, columns: int, *leaves: Tensor) -> tuple[Tensor, Tensor]:
        results = ((tile, _merge_blocks(layout, tiling, list(leaves), tile, columns)) for tile in tiling)
        both = _stacked(tiling, ((tile, torch.cat([out, lse.expand(*out.shape[:-1], 1)], -1)) for tile, (out, lse) in results))
        return both[..., :-1], both[..., -1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.layout, ctx.tiling, ctx.columns, *leaves = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *leaves)

    @staticmethod
    def backward(ctx: Any, by_out: Tensor | None, by_lse: Tensor | None) -> tuple[Any, ...]:
        out, lse, *leaves = ctx.saved_tensors
        layout: Layout = ctx.layout
        wanted = list(ctx.needs_input_grad[3:])
        if torch.is_grad_enabled():  # a second derivative is wanted
            by_out = torch.zeros_like(out) if by_out is None else by_out
            by_lse = torch.zeros_like(lse) if by_lse is None else by_lse
            return None, None, None, *replay(lambda *t: _whole_softmax(layout.parts(list(t)), ctx.tiling), leaves, wanted, (by_out, by_lse))
        totals = [torch.zeros_like(leaf) if want else None for leaf, want in zip(leaves, wanted, strict=True)]
        by_out = torch.zeros_like(out) if by_out is None else by_out
        level = (by_out * out).sum(-1, keepdim=True)
        level = level if by_lse is None else level - by_lse.unsqueeze(-1)
        safe = torch.where(lse == -math.inf, torch.zeros_like(lse), lse).unsqueeze(-1)
        for tile in ctx.tiling:
            for block in _blocks(tile, ctx.columns):
                gradients = _online_block(layout, ctx.tiling, leaves, wanted, block, by_out, level, safe)
                layout.add(totals, iter(gradients), block)
        return None, None, None, *totals


def _blocks(tile: Tile, columns: int) -> Iterator[Tile]:
    for low in range(tile.columns.start, tile.columns.stop, columns):
        yield Tile(tile.rows, slice(low, min(low + columns, tile.columns.stop)), tile.batch)


def _stacked(tiling: Tiling, results: Iterator[tuple[Tile, Tensor]]) -> Tensor:
    """Blocks of rows (..., rows, ·) put together to (..., m, ·)."""
    total: Tensor | None = None
    for tile, result in results:
        if total is None:
            batch = result.shape[:-2] if tiling.batch is None else tiling.batch
            total = result.new_empty(*batch, tiling.query_marks.shape[-1], result.shape[-1])
        at(total, tile.batch)[..., tile.rows, :] = result
    assert total is not None
    return total


def _summed(tiling: Tiling, results: Iterator[tuple[Tile, Tensor]]) -> Tensor:
    """Contributions of blocks, added up for each element of the batch."""
    total: Tensor | None = None
    for tile, result in results:
        if total is None:
            total = torch.zeros_like(result) if tiling.batch is None else result.new_zeros(*tiling.batch, *result.shape)
        (total if tile.batch is None else total[tile.batch]).add_(result)
    assert total is not None
    return total


def _merge_blocks(layout: Layout, tiling: Tiling, leaves: list[Tensor], tile: Tile, columns: int) -> tuple[Tensor, Tensor]:
    """One block of rows: attention over a union of key sets is the average of the parts, weighted by their masses."""
    total: Tensor | None = None
    for block in _blocks(tile, columns):
        parts = layout.parts(layout.cut(leaves, block))
        scores = parts.scores(tiling.allowed(block))
        top = scores.amax(-1, keepdim=True)
        weights = (scores - _finite(top)).exp_()
        out, mass = weights @ parts.values, weights.sum(-1, keepdim=True)
        if total is None:
            total, total_mass, highest = out, mass, top
            continue
        new = torch.maximum(highest, top)  # -inf as long as nothing was seen: such a part has no say
        old_share, new_share = (highest - _finite(new)).exp(), (top - _finite(new)).exp()
        total, total_mass, highest = total * old_share + out * new_share, total_mass * old_share + mass * new_share, new
    assert total is not None
    seen = total_mass != 0  # NaN counts as seen: it must reach the output
    out = torch.where(seen, total / torch.where(seen, total_mass, torch.ones_like(total_mass)), torch.zeros_like(total))
    return out, highest + total_mass.log()


def _online_block(
    layout: Layout, tiling: Tiling, leaves: list[Tensor], wanted: list[bool], block: Tile, by_out: Tensor, level: Tensor, lse: Tensor
) -> list[Tensor | None]:
    """Gradients of one block: dS = P ∘ (∂o Vᵀ - level), dV = Pᵀ ∂o, and dS through the potential by autograd."""
    some = [t.detach().requires_grad_(want) for t, want in zip(layout.cut(leaves, block), wanted, strict=True)]
    with torch.enable_grad():
        parts = layout.parts(some)
        scores = parts.scores(tiling.allowed(block))
    by_rows_out = at(by_out, block.batch)[..., block.rows, :]
    weights = (scores.detach() - at(lse, block.batch)[..., block.rows, :]).exp_()
    by_scores = (by_rows_out @ parts.values.detach().mT).sub_(at(level, block.batch)[..., block.rows, :]).mul_(weights)
    by_scores = by_scores.sum_to_size(scores.shape)  # the values may have batch dimensions that the scores lack
    moving = [t for t in some[:-1] if t.requires_grad]
    found = iter(
        torch.autograd.grad(scores, moving, by_scores, allow_unused=True) if moving and scores.requires_grad else [None] * len(moving)
    )
    gradients: list[Tensor | None] = [next(found) if t.requires_grad else None for t in some[:-1]]
    by_values = (weights.mT @ by_rows_out).sum_to_size(some[-1].shape) if wanted[-1] else None
    return [*gradients, by_values]


def replay(
    function: Callable[..., tuple[Tensor, ...]], leaves: list[Tensor], wanted: list[bool], gradients: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """The backward pass as a differentiable computation: run all of it again, with a graph. Right for any order; holds all pairs."""
    fresh = [leaf.view_as(leaf) for leaf in leaves]  # new nodes: gradients stop here even if one leaf was computed from another
    outputs = function(*fresh)
    pairs = [(out, gradient.expand(out.shape)) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
    moving = [leaf for leaf, want in zip(fresh, wanted, strict=True) if want]
    if not pairs or not moving:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad([o for o, _ in pairs], moving, [g for _, g in pairs], create_graph=True, allow_unused=True))
    return [next(found) if want else None for want in wanted]


def _whole_softmax(parts: Parts, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """Softmax attention and log-sum-exps of all rows at once."""
    whole = tiling.replace(rows=max(1, tiling.query_marks.shape[-1]), in_order=False, batch=None)
    scores, empty = without_empty_rows(parts.scores(whole.allowed(next(iter(whole)))))
    lse = scores.logsumexp(-1)
    out = zero_where((scores - lse.unsqueeze(-1)).exp(), empty) @ parts.values
    return out, (lse if empty is None else lse.masked_fill(empty.squeeze(-1), -math.inf)).expand(out.shape[:-1])


def _finite(level: Tensor) -> Tensor:
    return torch.where(level == -math.inf, torch.zeros_like(level), level)


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(function: BlockFunction, layout: Layout, tiling: Tiling, summed: bool, *leaves: Tensor) -> Tensor:
        results = ((tile, function(layout.parts(layout.cut(list(leaves), tile)), tiling.allowed(tile))) for tile in tiling)
        return (_summed if summed else _stacked)(tiling, results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.function, ctx.layout, ctx.tiling, ctx.summed, *leaves = inputs
        ctx.save_for_backward(*leaves)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        leaves, layout = list(ctx.saved_tensors), ctx.layout
        wanted = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():  # a second derivative is wanted
            whole = ctx.tiling.replace(rows=max(1, ctx.tiling.query_marks.shape[-1]), in_order=False, batch=None)
            tile = next(iter(whole))
            return (
                None,
                None,
                None,
                None,
                *replay(lambda *t: (ctx.function(layout.parts(list(t)), whole.allowed(tile)),), leaves, list(wanted), (gradient,)),
            )
        totals = [torch.zeros_like(leaf) if want else None for leaf, want in zip(leaves, wanted, strict=True)]
        for tile in ctx.tiling:
            some = [t.detach().requires_grad_(want) for t, want in zip(layout.cut(leaves, tile), wanted, strict=True)]
            with torch.enable_grad():
                result = ctx.function(layout.parts(some), ctx.tiling.allowed(tile))
            if not result.requires_grad:
                continue
            moving = [t for t in some if t.requires_grad]
            pull = at(gradient, tile.batch)
            pull = pull if ctx.summed else pull[..., tile.rows, :]
            found = iter(torch.autograd.grad(result, moving, pull, allow_unused=True))
            layout.add(totals, (next(found) if t.requires_grad else None for t in some), tile)
        return None, None, None, None, *totals
