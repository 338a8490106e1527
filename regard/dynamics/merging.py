"""merge_within: particles that are close become one heavier particle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._enclosed import lengths
from regard._object import Object
from regard._upper import Upper
from regard.errors import ArgumentError
from regard.measure import Measure


@dataclass(frozen=True, eq=False, repr=False)
class Merged(Object):
    """A measure whose close particles were united: `measure` has the atoms, labels (n,) say which of them
    each particle became, and `radius` is at least how far a particle was moved.

    Examples:
        >>> from regard.dynamics import merge_within
        >>> found = merge_within(regard.Measure(torch.tensor([[0.001], [0.002], [1.0]])), 0.1)  # a Merged
        >>> found.measure.size, found.labels.tolist(), found.radius <= 0.1
        (2, [0, 0, 1], True)
    """

    measure: Measure
    labels: Tensor
    radius: float

    def upper(self) -> Upper:
        """The radius as a number that is at least the true one."""
        return Upper(self.radius)


def merge_within(measure: Measure, within: float, shift: float = 0.0) -> Merged:
    """Unite particles that share a cell of diameter `within`; each moves to the heaviest of its cell, so
    atoms are particles and stay on a sphere. Masses add up, and W_∞ to what was is at most `within`.

    shift: where cells begin, in parts of one, so that a group that is cut once is not cut again.

    Examples:
        >>> from regard.dynamics import merge_within
        >>> found = merge_within(regard.Measure(torch.tensor([[0.001], [0.002], [1.0]])), 0.1)
        >>> sorted(round(mass, 3) for mass in found.measure.masses().tolist())
        [0.333, 0.667]
    """
    _check.positive("within", within)
    if measure.batch_shape:
        raise ArgumentError("measure", f"has batch shape {list(measure.batch_shape)}", "merge one measure")
    if measure.marks is not None:
        raise ArgumentError("measure", "has marks", "marks tell particles apart; merge() unites equal ones")
    points, masses = measure.points.detach(), measure.masses().detach()
    side = within / math.sqrt(measure.dimension)
    cells = torch.floor(points.double() / side + shift)
    labels = torch.unique(cells, dim=0, return_inverse=True)[1]
    order = torch.argsort(masses, descending=True, stable=True)  # the heaviest first, and the first of those
    count = int(labels.max()) + 1
    first = torch.full((count,), len(points), device=points.device).scatter_reduce(
        0, labels[order], torch.arange(len(points), device=points.device), "amin"
    )
    heaviest = order[first]
    together = torch.zeros(count, dtype=torch.float64, device=points.device).index_add(
        0, labels, masses.double()
    )
    moved = lengths(points.double() - points.double()[heaviest][labels], 1)
    atoms = Measure(measure.points[heaviest], together.log().to(points))
    return Merged(atoms, labels, float(moved.amax()))
