"""Whole rows of weights and of their change, in place: forward derivatives on plain tensors.

A forward pass takes two products of n × n × d. Six give outputs and tangents from scratch: the scores, their
change (two, as one of twice the width), weights with values and with tangents of values, and the weighted
change with values. Five give tangents alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CALM = 4.0
"""While the mean change of a row's scores is below this, it is taken out after the product with the values.

That saves a pass over all pairs; a larger mean would cost digits there.
"""


PAIRS_IN_PLACE = 1 << 20
"""Pairs in a block of whole rows: two numbers are held for each, and larger products are faster ones."""


@dataclass(frozen=True)
class Change:
    """How scores and values of some rows change: scores by left · rightᵀ plus a row `bias`, values by
    `values`; None where they do not.
    """

    left: Tensor | None
    right: Tensor | None
    bias: Tensor | None
    values: Tensor | None


class Rows:
    """The weights of some queries on all keys, in buffers that the next queries write over."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def weigh(self, q: Tensor, k: Tensor, *biases: Tensor | None) -> Tensor:
        """softmax(q kᵀ + biases); a row that sees nothing is zero."""
        scores = torch.mm(q, k.mT, out=self._buffer("weights", q, k))
        present = [bias for bias in biases if bias is not None]
        for bias in present:
            scores.add_(bias)
        empty = scores.amax(-1, keepdim=True) == -math.inf if present else None
        torch.softmax(scores, -1, out=scores)
        return scores if empty is None else scores.masked_fill_(empty, 0.0)

    def push(self, weights: Tensor, values: Tensor, out: Tensor, change: Change) -> tuple[Tensor, Tensor]:
        """Tangents of outputs, E[v'] + Cov(v, s'), and of log-sum-exps, E[s'] (m, 1)."""
        moved = torch.zeros_like(out) if change.values is None else weights @ change.values
        scores = self._scores(weights, change)
        if scores is None:
            return moved, torch.zeros_like(out[:, :1])
        mean = scores.mul_(weights).sum(-1, keepdim=True)
        level = _center(scores, weights, mean)
        return moved.addmm_(scores, values).addcmul_(level, out, value=-1), mean

    def _scores(self, weights: Tensor, change: Change) -> Tensor | None:
        """The change of the scores, in a buffer."""
        if change.left is None or change.right is None:
            return None if change.bias is None else change.bias.expand_as(weights).clone()
        scores = torch.mm(change.left, change.right.mT, out=self._buffer("change", change.left, change.right))
        return scores if change.bias is None else scores.add_(change.bias)

    def _buffer(self, name: str, rows: Tensor, columns: Tensor) -> Tensor:
        """Room for a number of each pair; one shape is kept, since the blocks of a causal mask all differ."""
        shape = (rows.shape[0], columns.shape[0])
        if name not in self._buffers or self._buffers[name].shape != shape:
            self._buffers[name] = rows.new_empty(shape)
        return self._buffers[name]


def _center(moved: Tensor, weights: Tensor, mean: Tensor) -> Tensor:
    """Take the mean change out of rows where it is large, in place; what is left of it in every row."""
    loud = (mean.squeeze(-1).abs() <= CALM).logical_not_().nonzero().squeeze(-1)
    if not len(loud):
        return mean
    if 4 * len(loud) > len(mean):
        return moved.addcmul_(weights, mean, value=-1).sum(-1, keepdim=True)
    some = torch.addcmul(moved[loud], weights[loud], mean[loud], value=-1)
    moved[loud] = some
    return mean.index_copy(0, loud, some.sum(-1, keepdim=True))  # rounded weights do not sum to one
