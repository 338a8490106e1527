"""A head in fewer coordinates: an orthonormal basis of what its projections read,
where rounding lets the basis be changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention import Attention
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.parameters import Tokens, in_basis, projections, walk
from regard.potentials.base import simple_parts, with_simple_parts
from regard.potentials.positions import PositionPotential

MARGIN = 1 + 1e-6
"""A factor for certificates that are made in the basis: more than the change of basis can change a bound,
where scores agree.
"""
AGREEMENT = 1e-9
"""How far scores in both coordinates may be apart, relative to 1 + |score|."""
APART = 1e-7
"""How far scores in both coordinates may be apart absolutely: weights then change by less than a third of
the margin, their products by less than all of it.
"""


@dataclass(frozen=True)
class Narrowed:
    """A head and its tokens in the coordinates it reads; margin: what certificates made there are
    multiplied by, one if nothing changed.
    """

    head: Attention
    source: Measure | Tensor
    margin: float

    @property
    def points(self) -> Tensor:
        """The tokens without their positions."""
        return points_of(self.source)


def narrow_head(head: Attention, source: Measure | Tensor) -> Narrowed:
    """The same head on tokens in an orthonormal basis of what its projections read: as many coordinates as
    these have columns.

    Nothing else of a token reaches the head, so constants are the same, and balls are those of what it sees.
    It is left as it is where that saves nothing, and where rounding moves a score: tokens far from the
    origin, or huge scores.
    """
    points, matrices = points_of(source), _read_by(head)
    if matrices is None or any(matrix.ndim != 2 or len(matrix) != points.shape[-1] for matrix in matrices):
        return Narrowed(head, source, 1.0)
    if sum(matrix.shape[-1] for matrix in matrices) >= points.shape[-1]:
        return Narrowed(head, source, 1.0)
    basis = torch.linalg.qr(torch.cat(matrices, -1))[0]
    seen = points @ basis
    narrow = Narrowed(
        in_basis(head, basis), source.replace(points=seen) if isinstance(source, Measure) else seen, MARGIN
    )
    return (
        narrow
        if _agree(_scores(head, source), _scores(narrow.head, narrow.source))
        else Narrowed(head, source, 1.0)
    )


def points_of(source: Measure | Tensor) -> Tensor:
    """The tokens without their positions."""
    return source.points if isinstance(source, Measure) else source


def _scores(head: Attention, source: Measure | Tensor) -> Tensor:
    measure = source if isinstance(source, Measure) else Measure(source)
    return head.potential.scores(measure.points, measure.points, measure.positions(), measure.positions())


def _agree(wide: Tensor, narrow: Tensor) -> bool:
    """Whether scores are the same up to a rounding that the margin covers; NaN agrees with nothing."""
    return bool(((wide - narrow).abs() <= (AGREEMENT * (1 + wide.abs())).clamp(max=APART)).all())


def _read_by(head: Attention) -> list[Tensor] | None:
    """The projections through which a head reads its tokens; None where it reads them in another way too."""
    terms = [part for part in simple_parts(head.potential) if not isinstance(part, PositionPotential)]
    sides = [{of for of, _ in projections(part)} for part in terms]
    if (
        not terms
        or any(side != {Tokens.QUERIES, Tokens.KEYS} for side in sides)
        or not projections(head.lookup)
    ):
        return None
    try:
        with_simple_parts(head.potential, lambda part: part)
    except ArgumentError:  # it may see tokens beside its parts
        return None
    matrices = [matrix for part in walk(head) for _, matrix in projections(part)]
    found = [matrix for matrix in matrices if matrix is not None]
    return found if len(found) == len(matrices) else None
