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
from regard._types import Features, over_scores
from regard.compute.tiles import Tile, Tiling
from regard.normalizers import Normalizer, Softmax
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
        scores = self.potential.pair(self.queries, self.keys) / over_scores(self.normalizer.temperature)
        if self.log_counts is not None:
            scores = scores + self.log_counts.mT
        return scores if allowed is None else scores.masked_fill(~allowed, -math.inf)


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
        roles = tuple(role for role, field in zip(ROLES, fields, strict=True) for leaf in pytree.tree_leaves(field) if isinstance(leaf, Tensor))
        template = tuple(_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return Layout(tree, template, roles), [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def cut(self, leaves: list[Tensor], tile: Tile) -> list[Tensor]:
        """The leaves of one block, as views."""
        return [leaf[(..., self._where(role, tile), slice(None))] if role != "shared" else leaf for leaf, role in zip(leaves, self.roles, strict=True)]

    def parts(self, leaves: list[Tensor]) -> Parts:
        """Parts again."""
        remaining = iter(leaves)
        filled = [next(remaining) if leaf is _HOLE else leaf for leaf in self.template]
        return pytree.tree_unflatten(filled, self.tree)  # type: ignore[no-any-return]

    def add(self, totals: list[Tensor | None], gradients: Iterator[Tensor | None], tile: Tile) -> None:
        """Add the gradients of one block where they belong."""
        for total, gradient, role in zip(totals, gradients, self.roles, strict=True):
            if total is not None and gradient is not None:
                (total if role == "shared" else total[(..., self._where(role, tile), slice(None))]).add_(gradient)

    @staticmethod
    def _where(role: str, tile: Tile) -> slice:
        return tile.rows if role == "query" else tile.columns


def online(parts: Parts, tiling: Tiling, columns: int) -> tuple[Tensor, Tensor]:
    """Softmax attention and log-sum-exps (..., m); keys are taken `columns` at a time."""
    layout, leaves = Layout.of(parts)
    return _Online.apply(layout, tiling, columns, *leaves)  # type: ignore[no-any-return]


def by_rows(function: BlockFunction, parts: Parts, tiling: Tiling, summed: bool = False) -> Tensor:
    """`function` on whole rows, block by block; the results are stacked along -2, or summed."""
    layout, leaves = Layout.of(parts)
    return _ByRows.apply(function, layout, tiling, summed, *leaves)  # type: ignore[no-any-return]


class _Online(torch.autograd.Function):
    @staticmethod
    def forward(layout: Layout, tiling: Tiling, columns: int, *leaves: Tensor) -> tuple[Tensor, Tensor]:
        outputs, log_sums = [], []
        for tile in tiling:
            out, lse = _merge_blocks(layout, tiling, list(leaves), tile, columns)
            outputs.append(out)
            log_sums.append(lse)
        return torch.cat(outputs, -2), torch.cat(log_sums, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.layout, ctx.tiling, ctx.columns, *leaves = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *leaves)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_out: Tensor | None, by_lse: Tensor | None) -> tuple[Any, ...]:
        out, lse, *leaves = ctx.saved_tensors
        layout: Layout = ctx.layout
        wanted = list(ctx.needs_input_grad[3:])
        totals = [torch.zeros_like(leaf) if want else None for leaf, want in zip(leaves, wanted, strict=True)]
        by_out = torch.zeros_like(out) if by_out is None else by_out
        level = (by_out * out).sum(-1)
        level = level if by_lse is None else level - by_lse
        safe = torch.where(lse == -math.inf, torch.zeros_like(lse), lse)
        for tile in ctx.tiling:
            for block in _blocks(tile, ctx.columns):
                gradients = _online_block(layout, ctx.tiling, leaves, wanted, block, by_out, level, safe)
                layout.add(totals, iter(gradients), block)
        return None, None, None, *totals


def _blocks(tile: Tile, columns: int) -> Iterator[Tile]:
    for low in range(tile.columns.start, tile.columns.stop, columns):
        yield Tile(tile.rows, slice(low, min(low + columns, tile.columns.stop)))


def _merge_blocks(layout: Layout, tiling: Tiling, leaves: list[Tensor], tile: Tile, columns: int) -> tuple[Tensor, Tensor]:
    """One block of rows: attention over a union of key sets is the average of the parts, weighted by their masses."""
    total: Tensor | None = None
    for block in _blocks(tile, columns):
        parts = layout.parts(layout.cut(leaves, block))
        scores = parts.scores(tiling.allowed(block))
        top = scores.amax(-1, keepdim=True)
        top = torch.where(top == -math.inf, torch.zeros_like(top), top)
        weights = (scores - top).exp_()
        out, mass = weights @ parts.values, weights.sum(-1, keepdim=True)
        if total is None:
            total, total_mass, highest = out, mass, top
            continue
        new = torch.maximum(highest, top)
        old_share, new_share = (highest - new).exp(), (top - new).exp()
        total, total_mass, highest = total * old_share + out * new_share, total_mass * old_share + mass * new_share, new
    assert total is not None
    seen = total_mass > 0
    out = torch.where(seen, total / torch.where(seen, total_mass, torch.ones_like(total_mass)), torch.zeros_like(total))
    return out, (highest + total_mass.log()).squeeze(-1)


def _online_block(
    layout: Layout, tiling: Tiling, leaves: list[Tensor], wanted: list[bool], block: Tile, by_out: Tensor, level: Tensor, lse: Tensor
) -> list[Tensor | None]:
    """Gradients of one block: dS = P ∘ (∂o Vᵀ - level), dV = Pᵀ ∂o, and dS through the potential by autograd."""
    some = [t.detach().requires_grad_(want) for t, want in zip(layout.cut(leaves, block), wanted, strict=True)]
    with torch.enable_grad():
        parts = layout.parts(some)
        scores = parts.scores(tiling.allowed(block))
    by_rows_out = by_out[..., block.rows, :]
    weights = (scores.detach() - lse[..., block.rows].unsqueeze(-1)).exp_()
    by_scores = (by_rows_out @ parts.values.detach().mT).sub_(level[..., block.rows].unsqueeze(-1)).mul_(weights)
    moving = [t for t in some[:-1] if t.requires_grad]
    found = iter(torch.autograd.grad(scores, moving, by_scores, allow_unused=True) if moving and scores.requires_grad else [None] * len(moving))
    gradients: list[Tensor | None] = [next(found) if t.requires_grad else None for t in some[:-1]]
    by_values = (weights.mT @ by_rows_out).sum_to_size(some[-1].shape) if wanted[-1] else None
    return [*gradients, by_values]


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(function: BlockFunction, layout: Layout, tiling: Tiling, summed: bool, *leaves: Tensor) -> Tensor:
        results = [function(layout.parts(layout.cut(list(leaves), tile)), tiling.allowed(tile)) for tile in tiling]
        return sum(results[1:], results[0]) if summed else torch.cat(results, -2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.function, ctx.layout, ctx.tiling, ctx.summed, *leaves = inputs
        ctx.save_for_backward(*leaves)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        leaves, layout = list(ctx.saved_tensors), ctx.layout
        wanted = ctx.needs_input_grad[4:]
        totals = [torch.zeros_like(leaf) if want else None for leaf, want in zip(leaves, wanted, strict=True)]
        for tile in ctx.tiling:
            some = [t.detach().requires_grad_(want) for t, want in zip(layout.cut(leaves, tile), wanted, strict=True)]
            with torch.enable_grad():
                result = ctx.function(layout.parts(some), ctx.tiling.allowed(tile))
            if not result.requires_grad:
                continue
            moving = [t for t in some if t.requires_grad]
            pull = gradient if ctx.summed else gradient[..., tile.rows, :]
            found = iter(torch.autograd.grad(result, moving, pull, allow_unused=True))
            layout.add(totals, (next(found) if t.requires_grad else None for t in some), tile)
        return None, None, None, None, *totals
