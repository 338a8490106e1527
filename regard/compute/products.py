"""Derivatives of softmax(scale · q kᵀ + bias) v in closed form, block by block, from the log-sum-exps that the kernel leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._transforms import untransformed
from regard.compute.sweep import KEY, QUERY, Give, Plan, Take, sweep
from regard.compute.tiles import Tile, Tiling

ARGUMENTS = (Take(QUERY), Take(KEY), Take(KEY), Take(KEY))
"""Queries, keys, values, and the bias on keys as a column."""


@dataclass(frozen=True)
class Products:
    """The plans for a scale, with or without a bias on keys. Tensors are (batch, heads, tokens, width)."""

    scale: float
    biased: bool

    @property
    def count(self) -> int:
        """How many arguments there are."""
        return 4 if self.biased else 3

    def pull(self, by_bias: bool) -> Plan:
        """Arguments, log-sum-exps, cotangents of the outputs, levels ⟨∂o, o⟩ - ∂lse; gradients of q, k, v and, if wanted, the bias."""

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
        return Plan(block, (*ARGUMENTS[: self.count], *(Take(QUERY),) * 3), gives)

    def push(
        self, arguments: Sequence[Tensor], out: Tensor, lse: Tensor, tangents: Sequence[Tensor | None], tiling: Tiling
    ) -> tuple[Tensor, Tensor]:
        """Tangents of outputs and log-sum-exps (B, H, m, 1), from tangents of the arguments. The tiling has whole rows."""
        q, k = arguments[:2]
        dq, dk, dv, *rest = tangents
        left = [t for t, other in ((dq, dq), (q, dk)) if other is not None and t is not None]
        right = [t for t, other in ((k, dq), (dk, dk)) if other is not None and t is not None]
        wide = [self.scale * torch.cat(left, -1), torch.cat(right, -1)] if left else []  # scale · (q' kᵀ + q k'ᵀ) as one product
        values, biases = [] if dv is None else [dv], [bias for bias in rest if bias is not None]
        roles = [QUERY, KEY] * (len(wide) // 2) + [KEY] * (len(values) + len(biases))
        takes = (*ARGUMENTS[: self.count], Take(QUERY), Take(QUERY), *(Take(role) for role in roles))
        plan = Plan(_Push(self, bool(wide), bool(values), bool(biases)), takes, (Give(QUERY), Give(QUERY)))
        out, mean = sweep(plan, tiling, [*arguments, out, lse, *wide, *values, *biases])
        return out, mean

    def weights(self, arguments: tuple[Tensor, ...], lse: Tensor, tiling: Tiling, tile: Tile) -> Tensor:
        """The weights of one block."""
        q, k = arguments[:2]
        scores = (self.scale * q) @ k.mT - lse
        scores = scores + arguments[3].mT if self.biased else scores
        mask = tiling.bias(tile, q.dtype)
        return (scores if mask is None else scores + mask).exp()


CALM = 4.0
"""A mean change of scores up to which it may be taken out after the product with the values, which saves a pass over all pairs."""


class _Push:
    """The block of the forward derivative. Where nothing else is being differentiated, it works in place in buffers that it keeps."""

    def __init__(self, products: Products, moves: bool, values_move: bool, bias_moves: bool) -> None:
        self.products, self.moves, self.values_move, self.bias_moves = products, moves, values_move, bias_moves
        self._buffers: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, tiling: Tiling, tile: Tile, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        count = self.products.count
        arguments, (out, lse), rest = tensors[:count], tensors[count : count + 2], tensors[count + 2 :]
        left, right = rest[:2] if self.moves else (None, None)
        by_values = rest[2 if self.moves else 0] if self.values_move else None
        if left is not None and right is not None and not self.bias_moves and lse.ndim == 2 and untransformed():
            return self._in_place(tiling, tile, arguments, out, lse, left, right, by_values)
        weights = self.products.weights(arguments, lse, tiling, tile)
        change = None if left is None or right is None else left @ right.mT
        if self.bias_moves:
            bias = rest[-1].mT
            change = bias.expand(*bias.shape[:-2], lse.shape[-2], bias.shape[-1]) if change is None else change + bias
        if change is None:
            assert by_values is not None
            return weights @ by_values, torch.zeros_like(lse)
        return covariance(weights, change, arguments[2], by_values)

    def _in_place(
        self,
        tiling: Tiling,
        tile: Tile,
        arguments: tuple[Tensor, ...],
        out: Tensor,
        lse: Tensor,
        left: Tensor,
        right: Tensor,
        by_values: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, *bias = arguments
        shape = (q.shape[0], k.shape[0])
        if shape not in self._buffers:
            self._buffers = {shape: (q.new_empty(shape), q.new_empty(shape))}  # one shape at a time: causal tiles all differ
        weights, change = self._buffers[shape]
        torch.addmm(-lse, self.products.scale * q, k.mT, out=weights)
        weights = weights if not bias else weights.add_(bias[0].mT)
        mask = tiling.bias(tile, q.dtype)
        weights = (weights if mask is None else weights.add_(mask)).exp_()
        torch.mm(left, right.mT, out=change).mul_(weights)
        mean = change.sum(-1, keepdim=True)
        if float(mean.abs().amax()) <= CALM:
            moved = (change @ v).addcmul_(mean, out, value=-1)
        else:
            moved = change.addcmul_(weights, mean, value=-1) @ v
        return (moved if by_values is None else moved.addmm_(weights, by_values)), mean


def covariance(weights: Tensor, change: Tensor, values: Tensor, by_values: Tensor | None) -> tuple[Tensor, Tensor]:
    """How means and log-masses of whole rows move with the scores: E[v'] + Cov(v, s') and E[s'].

    The scores' change is centered before it meets the values, so that a large common change of a row costs no digits.
    """
    moved = weights * change
    mean = moved.sum(-1, keepdim=True)
    out = (moved - weights * mean) @ values
    return out if by_values is None else out + weights @ by_values, mean
