"""Derivatives of softmax(scale · q kᵀ + bias) v in closed form, block by block.

The weights of a block are computed again from the log-sum-exps that the kernel leaves: P = exp(scores - lse).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._transforms import no_transform_runs
from regard.compute.kernel.rows import Change, Rows
from regard.compute.kernel.sweep import KEY, QUERY, Give, Sweep, Take, sum_blocks, sum_tiles
from regard.compute.kernel.tiles import Tile, Tiling

ARGUMENTS = (Take(QUERY), Take(KEY), Take(KEY), Take(KEY))
"""Queries, keys, values, and the bias on keys as a column."""


@dataclass(frozen=True)
class Products:
    """The sweeps for a scale, with or without a bias on keys. Tensors are (batch, heads, tokens, width)."""

    scale: float
    biased: bool

    @property
    def count(self) -> int:
        """How many arguments there are."""
        return 4 if self.biased else 3

    def pull(self, by_bias: bool) -> Sweep:
        """The reverse derivative: gradients of q, k, v and, if wanted, the bias.

        It takes the arguments, log-sum-exps, cotangents ∂o of the outputs, and levels ⟨∂o, o⟩ - ∂lse.
        """

        def block(tiling: Tiling, tile: Tile, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            arguments, (lse, by_out, level) = tensors[: self.count], tensors[self.count :]
            q, k, v = arguments[:3]
            weights = self.weights(arguments, lse, tiling, tile)
            by_scores = weights * (by_out @ v.mT - level)
            scaled = self.scale * by_scores
            gradients = (scaled @ k, scaled.mT @ q, weights.mT @ by_out)
            if not by_bias:
                return gradients
            columns = by_scores.sum(-2, keepdim=True).mT
            return *gradients, columns.sum_to_size(arguments[3].shape)

        gives = tuple(Give(take.role, index) for index, take in enumerate(ARGUMENTS[: 4 if by_bias else 3]))
        return Sweep(block, (*ARGUMENTS[: self.count], *(Take(QUERY),) * 3), gives)

    def push(
        self,
        arguments: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
        tangents: Sequence[Tensor | None],
        tiling: Tiling,
    ) -> tuple[Tensor, Tensor]:
        """The forward derivative: tangents of outputs and log-sum-exps (B, H, m, 1). Blocks are rows."""
        moving = _Moving.of(tangents)
        takes = (*ARGUMENTS[: self.count], Take(QUERY), Take(QUERY), *moving.takes())
        sweep = Sweep(_Push(self, moving), takes, (Give(QUERY), Give(QUERY)))
        found = sum_blocks(sweep, tiling, [*arguments, out, lse, *moving.tensors(arguments[1], tangents)])
        return found[0], found[1]

    def run_and_push(
        self, arguments: Sequence[Tensor], tangents: Sequence[Tensor | None], tiling: Tiling
    ) -> tuple[Tensor, Tensor]:
        """Outputs and their tangents, on plain tensors. Blocks are rows of one head."""
        moving = _Moving.of(tangents)
        takes = (*ARGUMENTS[: self.count], *moving.takes())
        sweep = Sweep(_RunAndPush(self, moving), takes, (Give(QUERY), Give(QUERY)))
        out, moved = sum_tiles(sweep, tiling, [*arguments, *moving.tensors(arguments[1], tangents)], tiling)
        return out, moved

    def weights(self, arguments: tuple[Tensor, ...], lse: Tensor, tiling: Tiling, tile: Tile) -> Tensor:
        """The weights of one block."""
        q, k = arguments[:2]
        scores = (self.scale * q) @ k.mT - lse
        scores = scores + arguments[3].mT if self.biased else scores
        mask = tiling.bias(tile, q.dtype)
        return (scores if mask is None else scores + mask).exp()

    def weigh(self, rows: Rows, arguments: tuple[Tensor, ...], tiling: Tiling, tile: Tile) -> Tensor:
        """The same in place, from all keys of the rows."""
        q, k = arguments[:2]
        bias = arguments[3].mT if self.biased else None
        return rows.weigh(self.scale * q, k, bias, tiling.bias(tile, q.dtype))


@dataclass(frozen=True)
class _Moving:
    """Which arguments have tangents, and how these are handed to blocks."""

    queries: bool
    keys: bool
    values: bool
    bias: bool

    @classmethod
    def of(cls, tangents: Sequence[Tensor | None]) -> _Moving:
        return cls(*(index < len(tangents) and tangents[index] is not None for index in range(4)))

    def takes(self) -> tuple[Take, ...]:
        """How the tensors are cut."""
        keys = (self.queries or self.keys) + self.values + self.bias
        return (*(Take(QUERY),) * self.queries, *(Take(KEY),) * keys)

    def tensors(self, k: Tensor, tangents: Sequence[Tensor | None]) -> list[Tensor]:
        """Tangents of queries; what they and queries are multiplied with; tangents of values and biases."""
        by_q, by_k, *rest = tangents
        wide = [t for t, there in ((k, self.queries), (by_k, self.keys)) if there and t is not None]
        right = [torch.cat(wide, -1)] if len(wide) > 1 else wide  # q' kᵀ + q k'ᵀ as one product with [q', q]
        return [t for t in (by_q, *right, *rest) if t is not None]

    def change(self, q: Tensor, scale: float, tensors: Sequence[Tensor]) -> Change:
        """What a block has of these tensors."""
        rest = list(tensors)
        left = [rest.pop(0)] if self.queries else []
        left = [*left, q] if self.keys else left
        right = rest.pop(0) if left else None
        by_values = rest.pop(0) if self.values else None
        bias = rest.pop(0).mT if self.bias else None
        return Change(scale * torch.cat(left, -1) if left else None, right, bias, by_values)


class _Push:
    """The block of the forward derivative.

    Where nothing else is being differentiated, it works in place in buffers that it keeps.
    """

    def __init__(self, products: Products, moving: _Moving) -> None:
        self.products, self._moving, self._rows = products, moving, Rows()

    def __call__(self, tiling: Tiling, tile: Tile, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        count, scale = self.products.count, self.products.scale
        arguments, (out, lse) = tensors[:count], tensors[count : count + 2]
        change = self._moving.change(arguments[0], scale, tensors[count + 2 :])
        if lse.ndim == 2 and no_transform_runs():
            weights = self.products.weigh(self._rows, arguments, tiling, tile)
            return self._rows.push(weights, arguments[2], out, change)
        weights = self.products.weights(arguments, lse, tiling, tile)
        moved = None if change.left is None or change.right is None else change.left @ change.right.mT
        if change.bias is not None:
            bias = change.bias.expand(*change.bias.shape[:-2], lse.shape[-2], change.bias.shape[-1])
            moved = bias if moved is None else moved + bias
        if moved is None:
            assert change.values is not None
            return weights @ change.values, torch.zeros_like(lse)
        return covariance(weights, moved, arguments[2], change.values)


class _RunAndPush:
    """The block of outputs and forward derivatives at once, in place."""

    def __init__(self, products: Products, moving: _Moving) -> None:
        self.products, self._moving, self._rows = products, moving, Rows()

    def __call__(self, tiling: Tiling, tile: Tile, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        count = self.products.count
        arguments = tensors[:count]
        change = self._moving.change(arguments[0], self.products.scale, tensors[count:])
        weights = self.products.weigh(self._rows, arguments, tiling, tile)
        out = weights @ arguments[2]
        return out, self._rows.push(weights, arguments[2], out, change)[0]


def covariance(
    weights: Tensor, change: Tensor, values: Tensor, by_values: Tensor | None
) -> tuple[Tensor, Tensor]:
    """How means and log-masses of whole rows move with the scores: E[v'] + Cov(v, s') and E[s'].

    The scores' change is centered before it meets the values, so that a large common change of a row costs no
    digits.
    """
    moved = weights * change
    mean = moved.sum(-1, keepdim=True)
    total = weights.sum(-1, keepdim=True)  # rounded weights sum to one only roughly
    out = (moved - weights * (mean / torch.where(total > 0, total, torch.ones_like(total)))) @ values
    return out if by_values is None else out + weights @ by_values, mean
