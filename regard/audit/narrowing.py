"""A head in fewer coordinates: an orthonormal basis of what its projections read, where rounding lets the basis be changed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._object import Object
from regard.attention import Attention
from regard.measure import Measure
from regard.potentials import Potential
from regard.potentials.positions import PositionPotential

PROJECTIONS = ("w_q", "w_k", "w_v")
MARGIN = 1 + 1e-6
"""More than the change of basis can change in a bound, where scores agree: a certificate in the basis is multiplied by it."""
AGREEMENT = 1e-9
"""How far scores in both coordinates may be apart, relative to 1 + |score|."""
APART = 1e-7
"""And how far at all: weights then change by less than a third of the margin, their products by less than the whole."""


@dataclass(frozen=True)
class Narrowed:
    """A head and its tokens in the coordinates it reads; margin: what certificates made there are multiplied by, one if nothing changed."""

    head: Attention
    source: Measure | Tensor
    margin: float

    @property
    def points(self) -> Tensor:
        """The tokens without their positions."""
        return points_of(self.source)


def narrowed(head: Attention, source: Measure | Tensor) -> Narrowed:
    """The same head on tokens in an orthonormal basis of what its projections read: as many coordinates as these have columns.

    Nothing else of a token reaches the head, so constants are the same, and balls are those of what it sees. It is left as it is where
    that saves nothing, and where rounding moves a score: tokens far from the origin, or huge scores.
    """
    points, read = points_of(source), _projections(head)
    matrices = [tensor for _, tensor in read if tensor.ndim == 2 and len(tensor) == points.shape[-1]]
    whole = {name for name, _ in read} != set(PROJECTIONS) or len(matrices) < len(read) or not _projects(head.potential)
    if whole or sum(matrix.shape[-1] for matrix in matrices) >= points.shape[-1]:
        return Narrowed(head, source, 1.0)
    basis = torch.linalg.qr(torch.cat(matrices, -1))[0]
    seen = points @ basis
    narrow = Narrowed(_in_basis(head, basis), source.replace(points=seen) if isinstance(source, Measure) else seen, MARGIN)
    return narrow if _agree(_scores(head, source), _scores(narrow.head, narrow.source)) else Narrowed(head, source, 1.0)


def points_of(source: Measure | Tensor) -> Tensor:
    """The tokens without their positions."""
    return source.points if isinstance(source, Measure) else source


def _scores(head: Attention, source: Measure | Tensor) -> Tensor:
    measure = source if isinstance(source, Measure) else Measure(source)
    return head.potential.scores(measure.points, measure.points, measure.positions(), measure.positions())


def _agree(wide: Tensor, narrow: Tensor) -> bool:
    """Whether scores are the same up to rounding that a margin covers; what is no number agrees with nothing."""
    return bool(((wide - narrow).abs() <= (AGREEMENT * (1 + wide.abs())).clamp(max=APART)).all())


def _projections(value: Any) -> list[tuple[str, Tensor]]:
    """Every w_q, w_k and w_v of a declaration, by name."""
    own = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.name in PROJECTIONS]
    inner = [part for f in dataclasses.fields(value) for part in _parts(getattr(value, f.name))]
    return [(name, tensor) for name, tensor in own if tensor is not None] + [pair for part in inner for pair in _projections(part)]


def _projects(potential: Any) -> bool:
    """Whether every term that reads tokens reads them through projections; biases of positions read none."""
    if isinstance(potential, PositionPotential):
        return True
    inner = [part for f in dataclasses.fields(potential) for part in _parts(getattr(potential, f.name)) if isinstance(part, Potential)]
    if inner:
        return all(_projects(part) for part in inner)
    return getattr(potential, "w_q", None) is not None and getattr(potential, "w_k", None) is not None


def _parts(value: Any) -> list[Object]:
    return [part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Object)]


def _in_basis(value: Any, basis: Tensor) -> Any:
    """A declaration whose projections read coordinates in a basis."""

    def turned(name: str, part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(turned(name, item) for item in part)
        if isinstance(part, Object):
            return _in_basis(part, basis)
        return basis.mT @ part if name in PROJECTIONS and part is not None else part

    return value.replace(**{f.name: turned(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)})
