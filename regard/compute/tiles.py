"""Blocks of rows: sizes, key ranges and masks. Everything here is O(rows · n)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._object import Object
from regard.potentials.reductions import Residue
from regard.supports import Full, Support

PAIRS = 1 << 19
"""Pairs in a tile: enough rows for a fast matrix product, few enough that the scores stay near the cache."""


def rows_of(batch: int, keys: int, width: int, pairs: int = PAIRS) -> int:
    """How many query rows make a tile."""
    return max(1, min(1024, pairs // max(1, batch * keys * width)))


Index = tuple[int, ...]


@dataclass(frozen=True)
class Tile:
    """Queries `rows` against keys `columns`, of one element of the batch (its index) or of all (None)."""

    rows: slice
    columns: slice
    batch: Index | None = None


def at(tensor: Tensor, batch: Index | None, kept: int = 2) -> Tensor:
    """The view of a tensor (..., *kept dimensions) at one element of a batch it broadcasts to."""
    if batch is None:
        return tensor
    lead = tensor.ndim - kept
    return tensor[tuple(i if size > 1 else 0 for i, size in zip(batch[len(batch) - lead :], tensor.shape[:lead], strict=True))]


@dataclass(frozen=True, eq=False, repr=False)
class Tiling(Object):
    """How the m × n pairs are cut into blocks of rows, with the mask and the position biases of each block.

    in_order says that marks are 0, 1, 2, ..., so that a causal or windowed block can leave out keys it cannot see.
    Given a batch shape, one element of the batch is taken after the other: its keys then stay in cache.
    """

    support: Support
    query_marks: Tensor
    key_marks: Tensor
    rows: int
    in_order: bool
    residues: tuple[Residue, ...] = ()
    batch: tuple[int, ...] | None = None

    def __iter__(self) -> Iterator[Tile]:
        queries, keys = self.query_marks.shape[-1], self.key_marks.shape[-1]
        for element in [None] if self.batch is None else itertools.product(*map(range, self.batch)):
            for low in range(0, queries, self.rows):
                high = min(low + self.rows, queries)
                yield Tile(slice(low, high), self._columns(low, high - 1, keys), element)

    def _columns(self, low: int, high: int, keys: int) -> slice:
        if not self.in_order:
            return slice(0, keys)
        first, last = self.support.span(low, high)
        start = 0 if first == -math.inf else max(0, math.ceil(first))
        stop = keys if last == math.inf else min(keys, math.floor(last) + 1)
        return slice(start, stop) if start < stop else slice(0, 1)  # never empty: the mask forbids that one key

    def allowed(self, tile: Tile) -> Tensor | None:
        """The mask of a tile; None where everything is allowed."""
        if isinstance(self.support, Full):
            return None
        return at(self.support.allows(self.query_marks[..., tile.rows], self.key_marks[..., tile.columns]), tile.batch)

    def bias(self, tile: Tile, dtype: torch.dtype) -> Tensor | None:
        """Mask and position biases of a tile as one additive bias (..., rows, columns)."""
        total: Tensor | None = None
        for residue in self.residues:
            part = residue.tile(tile.rows, tile.columns)
            total = part if total is None else total + part
        allowed = self.allowed(tile)
        if allowed is None:
            return None if total is None else total.to(dtype)
        if total is None:
            total = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return total.to(dtype).masked_fill(~allowed, -math.inf)
