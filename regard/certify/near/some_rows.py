"""Heads with some of their rows: bounds of one row cost far less, where tokens are wide or many."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from regard.certify.near.ellipsoids import head_shapes
from regard.certify.near.heads import LocalHead, LocalHeads, LocalValues


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
    part.heads = [local.with_rows(queries) for local in heads.heads]
    part.separate = _values_with_rows(heads.separate, part.heads)
    part.folded = None if heads.folded is None else _values_with_rows(heads.folded, part.heads)
    part.__dict__["_shapes"] = shapes = [copy.copy(shape) for shape in head_shapes(heads)]
    for shape, separate, folded in zip(shapes, part.separate, part.separate if part.folded is None else part.folded, strict=True):
        shape.separate, shape.folded = separate, folded
    return part


def _values_with_rows(values: list[LocalValues], heads: list[LocalHead]) -> list[LocalValues]:
    return [LocalValues(local, value.matrix, value.w) for local, value in zip(heads, values, strict=True)]
