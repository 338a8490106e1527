"""Derivatives of softmax(scale · q kᵀ + bias) v in closed form, block by block, from the log-sum-exps that the kernel leaves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.compute.sweep import KEY, QUERY, Give, Plan, Take
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
            weights = self._weights(arguments, lse, tiling, tile)
            by_scores = weights * (by_out @ v.mT - level)
            scaled = self.scale * by_scores
            gradients = (scaled @ k, scaled.mT @ q, weights.mT @ by_out)
            if not by_bias:
                return gradients
            columns = by_scores.sum(-2, keepdim=True).mT
            return *gradients, columns.sum_to_size(arguments[3].shape)

        gives = tuple(Give(take.role, index) for index, take in enumerate(ARGUMENTS[: 4 if by_bias else 3]))
        return Plan(block, (*ARGUMENTS[: self.count], *(Take(QUERY),) * 3), gives)

    def push(self, moving: tuple[int, ...]) -> Plan:
        """Arguments, log-sum-exps, tangents of some arguments; tangents of outputs and log-sum-exps. Blocks are whole rows."""

        def block(tiling: Tiling, tile: Tile, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            arguments, lse, tangents = tensors[: self.count], tensors[self.count], tensors[self.count + 1 :]
            weights = self._weights(arguments, lse, tiling, tile)
            by = dict(zip(moving, tangents, strict=True))
            change = self._change(arguments, by)
            if change is None:
                return weights @ by[2], torch.zeros_like(lse)
            return covariance(weights, change, arguments[2], by.get(2))

        takes = (*ARGUMENTS[: self.count], Take(QUERY), *(ARGUMENTS[index] for index in moving))
        return Plan(block, takes, (Give(QUERY), Give(QUERY)))

    def _weights(self, arguments: tuple[Tensor, ...], lse: Tensor, tiling: Tiling, tile: Tile) -> Tensor:
        q, k = arguments[:2]
        scores = (self.scale * q) @ k.mT - lse
        scores = scores + arguments[3].mT if self.biased else scores
        mask = tiling.bias(tile, q.dtype)
        return (scores if mask is None else scores + mask).exp()

    def _change(self, arguments: tuple[Tensor, ...], by: dict[int, Tensor]) -> Tensor | None:
        """The scores' change, scale · (q' kᵀ + q k'ᵀ) + bias'."""
        q, k = arguments[:2]
        left = [t for t, moves in ((by.get(0), 0 in by), (q, 1 in by)) if moves and t is not None]
        right = [t for t, moves in ((k, 0 in by), (by.get(1), 1 in by)) if moves and t is not None]
        change = (self.scale * torch.cat(left, -1)) @ torch.cat(right, -1).mT if left else None
        if 3 not in by:
            return change
        bias = by[3].mT
        return bias.expand(*bias.shape[:-2], q.shape[-2], bias.shape[-1]) if change is None else change + bias


def covariance(weights: Tensor, change: Tensor, values: Tensor, by_values: Tensor | None) -> tuple[Tensor, Tensor]:
    """How means and log-masses of whole rows move with the scores: E[v'] + Cov(v, s') and E[s'].

    The scores' change is centered before it meets the values, so that a large common change of a row costs no digits.
    """
    moved = weights * change
    mean = moved.sum(-1, keepdim=True)
    out = (moved - weights * mean) @ values
    return out if by_values is None else out + weights @ by_values, mean
