"""Derivatives of softmax(scale · q kᵀ + bias) v in closed form, block by block.

The weights of a block are computed again from the log-sum-exps that the kernel leaves: P = exp(scores - lse).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._transforms import no_transform_runs
from regard.compute.kernel.sweep import KEY, QUERY, Give, Sweep, Take, sum_blocks
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
        k = arguments[1]
        by_q, by_k, by_v, *rest = tangents
        wide = [t for t, moves in ((k, by_q), (by_k, by_k)) if t is not None and moves is not None]
        right = (
            [torch.cat(wide, -1)] if len(wide) > 1 else wide
        )  # scale · (q' kᵀ + q k'ᵀ) as one product with [q', q]
        queries, values = ([] if t is None else [t] for t in (by_q, by_v))
        biases = [bias for bias in rest if bias is not None]
        roles = [QUERY] * len(queries) + [KEY] * (len(right) + len(values) + len(biases))
        takes = (*ARGUMENTS[: self.count], Take(QUERY), Take(QUERY), *(Take(role) for role in roles))
        sweep = Sweep(
            _Push(self, by_q is not None, by_k is not None, bool(values), bool(biases)),
            takes,
            (Give(QUERY), Give(QUERY)),
        )
        out, mean = sum_blocks(sweep, tiling, [*arguments, out, lse, *queries, *right, *values, *biases])
        return out, mean

    def weights(self, arguments: tuple[Tensor, ...], lse: Tensor, tiling: Tiling, tile: Tile) -> Tensor:
        """The weights of one block."""
        q, k = arguments[:2]
        scores = (self.scale * q) @ k.mT - lse
        scores = scores + arguments[3].mT if self.biased else scores
        mask = tiling.bias(tile, q.dtype)
        return (scores if mask is None else scores + mask).exp()


CALM = 4.0
"""While the mean change of a row's scores is below this, it is taken out after the product with the values.

That saves a pass over all pairs; a larger mean would cost digits there.
"""


class _Push:
    """The block of the forward derivative.

    Where nothing else is being differentiated, it works in place in buffers that it keeps.
    """

    def __init__(self, products: Products, queries: bool, keys: bool, values: bool, bias: bool) -> None:
        self.products, self._queries, self._keys, self._values, self._bias = (
            products,
            queries,
            keys,
            values,
            bias,
        )
        self._buffers: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, tiling: Tiling, tile: Tile, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        count = self.products.count
        arguments, (out, lse), rest = tensors[:count], tensors[count : count + 2], list(tensors[count + 2 :])
        left = [rest.pop(0)] if self._queries else []
        left = [*left, arguments[0]] if self._keys else left
        right = rest.pop(0) if left else None
        by_values = rest.pop(0) if self._values else None
        if right is not None and not self._bias and lse.ndim == 2 and no_transform_runs():
            return self._in_place(
                tiling, tile, arguments, out, lse, self.products.scale * torch.cat(left, -1), right, by_values
            )
        weights = self.products.weights(arguments, lse, tiling, tile)
        change = None if right is None else (self.products.scale * torch.cat(left, -1)) @ right.mT
        if self._bias:
            bias = rest.pop(0).mT
            change = (
                bias.expand(*bias.shape[:-2], lse.shape[-2], bias.shape[-1])
                if change is None
                else change + bias
            )
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
            self._buffers = {
                shape: (q.new_empty(shape), q.new_empty(shape))
            }  # one shape at a time: causal tiles all differ
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
            change.addcmul_(weights, mean, value=-1)
            moved = (change @ v).addcmul_(
                change.sum(-1, keepdim=True), out, value=-1
            )  # rounded weights do not sum to one
        return (moved if by_values is None else moved.addmm_(weights, by_values)), mean


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
