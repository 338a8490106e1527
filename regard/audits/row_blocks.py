"""row_blocks: scores and laws of some queries of a site at a time, where all of them would fill memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from regard.audits.site import Site
from regard.audits.watching import ObservedSite
from regard.normalizers import Reference

ROOM = 1 << 20
"""Scores that are held at once: 8 MiB in float64."""


@dataclass(frozen=True)
class RowBlock:
    """Scores (h, b, m), which pairs are visible (b, m), and the laws (h, b, m) of b queries."""

    scores: Tensor
    allowed: Tensor
    laws: Tensor


def row_blocks(site: Site | ObservedSite) -> Iterator[RowBlock]:
    """All queries, a few at a time; at once where they are few, or where rows depend on each other."""
    if isinstance(site, ObservedSite):
        yield RowBlock(site.scores, site.allowed, site.laws)
        return
    count, pairs = len(site.points), site.heads * len(site.points) ** 2
    if pairs <= ROOM or not site.attention.normalizer.rowwise:
        yield RowBlock(site.scores, site.allowed, site.laws)
        return
    rows = max(1, ROOM * count // pairs)
    for low in range(0, count, rows):
        yield _block(site, slice(low, low + rows))


def _block(site: Site, rows: slice) -> RowBlock:
    marks, others = site.positions()
    keys = site.points if site.context is None else site.context
    scores = site.attention.potential.scores(site.points[rows], keys, marks[rows], others)
    found = site.attention.support.allows(marks[rows], others)
    allowed = found.expand(*found.shape[:-2], scores.shape[-2], len(keys))
    laws = site.attention.normalizer.weights(scores, Reference(allowed=allowed))
    return RowBlock(scores, allowed, laws)
