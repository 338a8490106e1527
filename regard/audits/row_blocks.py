"""row_blocks: scores and laws of some queries of a site at a time, where all of them would fill memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.audits.site import Site
from regard.audits.watching import ObservedSite
from regard.normalizers import Reference
from regard.potentials import Potential
from regard.potentials.base import linear_terms, of_terms
from regard.potentials.positions import PositionPotential

NORMAL = torch.finfo(torch.float32).tiny
"""Weights below this have lost digits in float32, or are zero."""
ROOM = 1 << 20
"""Scores that are held at once: 8 MiB in float64."""


@dataclass(frozen=True)
class RowBlock:
    """Scores (h, b, m), what of them is no bias by position, which pairs are visible (b, m), and the laws
    (h, b, m) of b queries.
    """

    scores: Tensor
    compared: Tensor
    allowed: Tensor
    laws: Tensor

    @property
    def visible(self) -> Tensor:
        """Which pairs are visible, (h, b, m): not those that a bias by position alone takes out of the normal
        numbers of float32, as windows hide each other by -100.
        """
        hidden = (self.scores - self.compared <= math.log(NORMAL)) & (self.laws < NORMAL)
        return self.allowed & ~hidden


def row_blocks(site: Site | ObservedSite) -> Iterator[RowBlock]:
    """All queries, a few at a time; at once where they are few, or where rows depend on each other."""
    if isinstance(site, ObservedSite):
        yield RowBlock(site.scores, _compared_at(site), site.allowed, site.laws)
        return
    count, pairs = len(site.points), site.heads * len(site.points) ** 2
    if pairs <= ROOM or not site.attention.normalizer.rowwise:
        yield RowBlock(site.scores, _compared_at(site), site.allowed, site.laws)
        return
    rows = max(1, ROOM * count // pairs)
    for low in range(0, count, rows):
        yield _block(site, slice(low, low + rows))


def _block(site: Site, rows: slice) -> RowBlock:
    marks, others = site.positions()
    keys = site.points if site.context is None else site.context
    potential = site.attention.potential
    scores = potential.scores(site.points[rows], keys, marks[rows], others)
    part = _compared(potential)
    compared = scores if part is None else part.scores(site.points[rows], keys, marks[rows], others)
    found = site.attention.support.allows(marks[rows], others)
    allowed = found.expand(*found.shape[:-2], scores.shape[-2], len(keys))
    laws = site.attention.normalizer.weights(scores, Reference(allowed=allowed))
    return RowBlock(scores, compared, allowed, laws)


def _compared(potential: Potential) -> Potential | None:
    """A potential without masks and other biases by position; None where it has none, or nothing else."""
    terms = linear_terms(potential)
    others = [pair for pair in terms if not isinstance(pair[0], PositionPotential)]
    return None if len(others) == len(terms) else of_terms(others)


def _compared_at(site: Site | ObservedSite) -> Tensor:
    """The scores of all pairs without biases by position."""
    if isinstance(site, ObservedSite):
        part = _compared(site.seen.potential)
        return site.scores if part is None else replace(site.seen, potential=part).scores
    part, marks = _compared(site.attention.potential), site.positions()
    keys = site.points if site.context is None else site.context
    return site.scores if part is None else part.scores(site.points, keys, *marks)
