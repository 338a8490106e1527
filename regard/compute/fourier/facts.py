"""Facts: what is read from the data before a run, and the error that follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard._refused import Refused
from regard._upper import ELEMENTARY, UNIT, Lower, Upper
from regard.compute.fourier.form import Form
from regard.compute.fourier.processes import OneProcess, Processes
from regard.compute.fourier.series import Series
from regard.compute.fourier.transforms import Transform
from regard.compute.problem import Problem

CELLS = 1 << 24
"""Cells in which keys are counted at most."""


@dataclass(frozen=True, eq=False, repr=False)
class Facts(Object):
    """What was read from the data before the run.

    center: of queries and keys. reach: the largest |x - y| on an axis, in bandwidths. share: at least
    D(x_i)/W for every query. radius (b, 1): of the values around their center; length: the least, in
    bandwidths.
    slack: the relative error of weights. drift: values are the keys, so that one density is enough.
    Of the processes that hold the points: the most queries and the most keys of one, and the keys of all.
    """

    center: Tensor
    values_center: Tensor
    reach: float
    dimension: int
    share: float
    radius: Tensor
    length: float
    slack: float
    drift: bool
    queries: int
    own_keys: int
    keys: int

    def errors(self, series: Series, transform: Transform, keys: int) -> tuple[Upper, Upper]:
        """κ of a sum and of the length of a gradient, for strengths of total size one.

        Units more for the bandwidth, which is rounded three times: |∂k/∂log s| ≤ 2/e and |∂∇k/∂log s| ≤ 3/2.
        """
        kernel, gradient = series.errors()
        rounding, steeper = transform.rounding(series, keys)
        return Upper(kernel + rounding + 3 * UNIT, 2), Upper(gradient + steeper + 6 * UNIT, 2)

    def bound(self, series: Series, transform: Transform, keys: int) -> float:
        """At least the error of every output, relative to the radius of the values, before the run."""
        error, gradient = self.errors(series, transform, keys)
        left = Lower(self.share) - error
        if float(left) <= 0.5 * self.share:
            return math.inf
        lost, quotient = 4 * Upper(self.slack), Upper(8 * UNIT)
        if not self.drift:
            return float(2 * error / left + lost + quotient)
        diagonal = Upper(self.reach * math.sqrt(self.dimension), 2)
        return float(((gradient + diagonal * error) / left + diagonal * quotient) / Lower(self.length) + lost)


def look(problem: Problem, form: Form, processes: Processes = OneProcess()) -> Facts | Refused:
    """What the data say before a run, those of all processes together."""
    known = _check.holds(_is_finite(form))
    if known is None:
        return Refused(
            "the box of the points must be read before the run, and here it cannot (compile, vmap)."
        )
    if not processes.every(known):
        return Refused("points, values and weights must be finite, and some key must have mass.")
    queries, keys, values, scale = (t.detach() for t in form.tensors())
    low, high = _box(processes, queries, keys)
    center, sides = (0.5 * low + 0.5 * high).unsqueeze(-2), ((high - low) / scale).amax(-1)
    reach = _number(sides.amax()) * (1 + 1e-13)
    if not reach < 1e6:
        return Refused(f"a box of {reach:.3g} bandwidths needs too many modes; take a larger bandwidth.")
    bottom, top = (end.unsqueeze(-2) for end in _box(processes, values))
    middle = 0.5 * bottom + 0.5 * top
    far = torch.maximum(top - middle, middle - bottom)
    radius = torch.linalg.vector_norm(far, dim=-1)
    slack = 0.0
    if form.log_weights is not None:
        largest = _number(torch.nan_to_num(form.log_weights.detach(), neginf=0.0).abs().amax())
        slack = (ELEMENTARY + 4 + 3 * largest + (keys.shape[-1] + 8) * form.size) * UNIT
    every = round(_number(processes.total(keys.new_tensor(keys.shape[-2]))))
    with torch.no_grad():
        share = _least_share(form, center, reach, every, processes)
    length = _number((radius / scale).amin()) * (1 - 1e-12)
    drift = problem.values is problem.keys and length >= 0.5  # closer together, values lose less than ∇D
    held = [queries.shape[-2], keys.shape[-2], slack, not drift]
    most, own_keys, slack, not_drift = processes.largest(radius.new_tensor(held)).tolist()
    dimension, counts = keys.shape[-1], (int(most), int(own_keys), every)
    return Facts(center, middle, reach, dimension, share, radius, length, slack, not not_drift, *counts)


def _is_finite(form: Form) -> Tensor:
    """Whether points, values and weights are, and some key has mass."""
    finite = torch.stack([torch.isfinite(t.detach()).all() for t in form.tensors()]).all()
    if form.log_weights is None:
        return finite
    logs = form.log_weights.detach()
    return finite & ~(logs.isnan() | (logs == math.inf)).any() & (form.level > -math.inf).all()


def _box(processes: Processes, *points: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest coordinates (b, d) of all points."""
    ends = [torch.cat([-t.amin(-2), t.amax(-2)], -1) for t in points]
    below, high = processes.largest(torch.stack(ends).amax(0)).chunk(2, -1)
    return -below, high


def _least_share(
    form: Form, center: Tensor, reach: float, keys: int, processes: Processes = OneProcess()
) -> float:
    """At most D(x_i)/W, for every query: the largest of three bounds from below, with so many keys in all.

    Its own weight, where queries are the keys. The keys in its cell of a grid of side one, which are at most
    √d away. And e^{-Σ_j w_j |x - y_j|²/2W}, by Jensen's inequality.
    """
    x, y = form.points(center)
    weights, dimension = form.weights()[0], y.shape[-1]
    total = processes.total(weights.sum(-1, keepdim=True))
    mean = processes.total(weights.unsqueeze(-2) @ y) / total.unsqueeze(-1)
    apart = sum((w * (z - mean).square().sum(-1)).sum(-1, keepdim=True) for z, w in _rows(y, weights))
    spread = processes.total(torch.as_tensor(apart)) / total
    rounding = (
        1e-9 + 8 * (keys + processes.count) * UNIT * dimension * reach**2
    )  # of the mean, and of the spread
    own = form.same or (x.shape == y.shape and torch.equal(x, y))
    side, low = math.floor(reach) + 2, _box(processes, x, y)[0].unsqueeze(-2)
    masses = None
    if side**dimension * len(x) <= CELLS:
        masses = y.new_zeros(len(y), side**dimension)
        for z, w in _rows(y, weights):
            masses.scatter_add_(-1, _cells(z - low, side), w)
        masses = processes.total(masses)
    least = math.inf
    for z, w in _rows(x, weights if own else x[..., 0]):
        apart = (z - mean).square().sum(-1) + spread
        share = torch.exp(-0.5 * apart - rounding)
        if own:
            share = torch.maximum(share, w / total)
        if masses is not None:
            near = masses.gather(-1, _cells(z - low, side)) / total * math.exp(-0.5 * dimension)
            share = torch.maximum(share, near)
        least = min(least, _number(share.amin()))
    return -processes.most(-least) * (1 - 1e-6)  # sums of as many masses as there are keys


def _rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of each (b, n, ...) at a time, so that what is made of them stays small."""
    for start in range(0, tensors[0].shape[1], 1 << 16):
        yield tuple(t[:, start : start + (1 << 16)] for t in tensors)


def _cells(offsets: Tensor, side: int) -> Tensor:
    """The number of the cell of side one that each point is in."""
    places = offsets.floor().long().clamp_(0, side - 1)
    found = places[..., 0]
    for axis in range(1, places.shape[-1]):
        found = found * side + places[..., axis]
    return found


def _number(value: Tensor) -> float:
    return float(value.detach())
