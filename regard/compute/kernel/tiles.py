"""Blocks of rows: sizes, key ranges and masks. Everything here is O(rows · n)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard.potentials.reductions import Residue
from regard.supports import Causal, Full, Support
from regard.supports.base import conjuncts

PAIRS = 1 << 19
"""Pairs in a tile: enough rows for a fast matrix product, few enough that the scores stay near the cache."""


def rows_per_tile(batch: int, keys: int, width: int, pairs: int = PAIRS) -> int:
    """How many query rows make a tile."""
    return max(1, min(1024, pairs // max(1, batch * keys * width)))


Index = tuple[int, ...]


@dataclass(frozen=True)
class Tile:
    """Queries `rows` against keys `columns`, of one element of the batch (its index) or of all (None)."""

    rows: slice
    columns: slice
    batch: Index | None = None


def element_of_batch(tensor: Tensor, batch: Index | None, kept: int = 2) -> Tensor:
    """The view of a tensor (..., *kept dimensions) at one element of a batch it broadcasts to."""
    if batch is None:
        return tensor
    lead = tensor.ndim - kept
    return tensor[
        tuple(
            i if size > 1 else 0
            for i, size in zip(batch[len(batch) - lead :], tensor.shape[:lead], strict=True)
        )
    ]


@dataclass(frozen=True, eq=False, repr=False)
class Tiling(Object):
    """How the m × n pairs are cut into blocks of rows, with the mask and the position biases of each block.

    in_order says that marks are 0, 1, 2, ..., so that a causal or windowed block can leave out keys it cannot
    see. Given a batch shape, one element of the batch is taken after the other: its keys then stay in cache.
    Given `columns`, blocks take that many keys at a time; else whole rows. Given `heads`, the batch shape
    that tensors (B, H, tokens, width) stand for, biases come as (B, H, rows, columns). No block of rows goes
    across a seam.
    """

    support: Support
    query_marks: Tensor
    key_marks: Tensor
    rows: int
    in_order: bool
    residues: tuple[Residue, ...] = ()
    batch: tuple[int, ...] | None = None
    columns: int | None = None
    heads: tuple[int, ...] | None = None
    seams: tuple[int, ...] = ()

    def blocks(self) -> Iterator[Tile]:
        """Blocks of rows and columns."""
        for tile in self:
            yield from self.cut(tile)

    def cut(self, tile: Tile) -> Iterator[Tile]:
        """A block of rows, in blocks of columns."""
        for low in range(
            tile.columns.start, tile.columns.stop, self.columns or tile.columns.stop - tile.columns.start
        ):
            yield Tile(
                tile.rows,
                slice(low, min(low + (self.columns or tile.columns.stop), tile.columns.stop)),
                tile.batch,
            )

    def whole_rows(self) -> Tiling:
        """The same number of pairs in blocks of whole rows."""
        if self.columns is None:
            return self
        return self.replace(
            rows=max(1, self.rows * self.columns // max(1, self.key_marks.shape[-1])), columns=None
        )

    def fewer_rows(self, factor: int) -> Tiling:
        """Smaller blocks, for blocks that are computed several at a time."""
        return self.replace(rows=max(1, self.rows // max(1, factor)))

    def __iter__(self) -> Iterator[Tile]:
        queries = self.query_marks.shape[-1]
        for element in [None] if self.batch is None else itertools.product(*map(range, self.batch)):
            for start, stop in itertools.pairwise((0, *self.seams, queries)):
                for low in range(start, stop, self.rows):
                    high = min(low + self.rows, stop)
                    yield Tile(slice(low, high), self.columns_of(low, high - 1), element)

    def columns_of(self, low: int, high: int) -> slice:
        """The keys that queries low, ..., high may see; all where tokens are not in order."""
        keys = self.key_marks.shape[-1]
        if not self.in_order:
            return slice(0, keys)
        first, last = self.support.span(low, high)
        start = 0 if first == -math.inf else max(0, math.ceil(first))
        stop = keys if last == math.inf else min(keys, math.floor(last) + 1)
        return (
            slice(start, stop) if start < stop else slice(0, 1)
        )  # never empty: the mask forbids that one key

    def allowed(self, tile: Tile) -> Tensor | None:
        """The mask of a tile; None where everything is allowed."""
        if isinstance(self.support, Full):
            return None
        return element_of_batch(
            self.support.allows(self.query_marks[..., tile.rows], self.key_marks[..., tile.columns]),
            tile.batch,
        )

    def is_past(self, tile: Tile) -> bool:
        """Whether nothing is added to a tile but that its queries do not see the keys after them."""
        square = tile.rows == tile.columns and self.query_marks.ndim == self.key_marks.ndim == 1
        if not square or self.residues or not self.in_order or isinstance(self.support, Full):
            return False
        parts = conjuncts(self.support)
        others = [part for part in parts if not isinstance(part, Causal)]
        if len(others) < len(parts) and all(p.sees_all(tile.rows.start, tile.rows.stop - 1) for p in others):
            return True
        allowed = self.allowed(tile)
        assert allowed is not None
        if allowed.ndim != 2:
            return False
        return bool(_check.holds((allowed == torch.ones_like(allowed).tril_()).all()))

    def bias(self, tile: Tile, dtype: torch.dtype) -> Tensor | None:
        """Mask and position biases of a tile as one additive bias (..., rows, columns)."""
        total: Tensor | None = None
        for residue in self.residues:
            part = residue.tile(tile.rows, tile.columns)
            total = part if total is None else total + part
        allowed = self.allowed(tile)
        if allowed is not None and not _check.holds(allowed.all()):
            total = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device) if total is None else total
            total = total.masked_fill(~allowed, -math.inf)
        if total is None:
            return None
        return (
            total.to(dtype)
            if self.heads is None
            else as_four_dimensions(total.to(dtype), torch.Size(self.heads), False)
        )


def as_four_dimensions(t: Tensor, batch: torch.Size, expand: bool) -> Tensor:
    """(..., a, b) as (B, H, a, b).

    Not expanded, dimensions of size one stay: the kernel broadcasts a bias without a copy.
    """
    if t.ndim == 4 and len(batch) == 2 and (not expand or t.shape[:2] == batch):
        return t if t.stride(-1) == 1 else t.contiguous()
    if len(batch) > 2:
        t = t.expand(*batch, *t.shape[-2:]).reshape(math.prod(batch[:-1]), batch[-1], *t.shape[-2:])
    else:
        t = t.reshape((1,) * (4 - t.ndim) + t.shape)
    if expand:
        two = (1,) * (2 - min(len(batch), 2)) + tuple(batch) if len(batch) <= 2 else t.shape[:2]
        t = t.expand(*two, *t.shape[-2:])
    return t if t.stride(-1) == 1 else t.contiguous()
