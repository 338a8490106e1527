"""Heads with some of their rows: what bounds of one row cost far less with, where tokens are wide."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from regard.certify.near.ellipsoids import head_shapes
from regard.certify.near.heads import LocalHead, LocalHeads, LocalValues


def queries_of(local: LocalHead) -> Tensor:
    """The tokens whose rows a head has: all, or those of `rows_of`."""
    found = local.__dict__.get("_queries")
    return torch.arange(local.n) if found is None else found


def rows_of(heads: LocalHeads, rows: slice) -> LocalHeads:
    """The same heads with some of their rows; made once, for every radius."""
    queries = torch.arange(heads.n)[rows]
    if len(queries) == heads.n:
        return heads
    kept = heads.__dict__.setdefault("_row_parts", {})
    key = tuple(queries.tolist())
    if key not in kept:
        kept.clear()
        kept[key] = _with_rows(heads, queries)
    return kept[key]


def _with_rows(heads: LocalHeads, queries: Tensor) -> LocalHeads:
    part = copy.copy(heads)
    part.heads = [_head_with_rows(local, queries) for local in heads.heads]
    part.separate = _values_with_rows(heads.separate, part.heads)
    part.folded = None if heads.folded is None else _values_with_rows(heads.folded, part.heads)
    part.__dict__["_shapes"] = shapes = [copy.copy(shape) for shape in head_shapes(heads)]
    for shape, separate, folded in zip(shapes, part.separate, part.separate if part.folded is None else part.folded, strict=True):
        shape.separate, shape.folded = separate, folded
    return part


def _values_with_rows(values: list[LocalValues], heads: list[LocalHead]) -> list[LocalValues]:
    return [LocalValues(local, value.matrix, value.w) for local, value in zip(heads, values, strict=True)]


BY_ROW = ("p", "log_p", "seen", "log_rest", "odds", "y", "alpha", "own", "own_size", "own_spread", "own_apart")
"""What a head has for each row, that bounds of rows read."""


def _head_with_rows(local: LocalHead, queries: Tensor) -> LocalHead:
    """Facts of some rows. Directions of these few are few themselves, and need no other coordinates."""
    part = copy.copy(local)
    part.__dict__.pop("own_pairs", None)
    part.__dict__.update({name: getattr(local, name)[queries] for name in BY_ROW})
    part.__dict__.update(own_narrow=(part.own, 0.0), _queries=queries)
    return part
