"""Which keys share an atom: cells that are cut where they are widest, or clusters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from regard._groups import FEW, away_from, covariances, largest_in, means_in, spread_out, squares, sums_in

Criterion = Callable[["Widths"], Tensor]
"""How much each cell is in the way of a bound, (k,)."""

SMALLEST = 1e-13
"""Cells whose logits differ by less than this part of the largest are not cut."""


@dataclass(frozen=True)
class Widths:
    """How wide cells are (k,): reach and spread of the logits, reach and spread of the values."""

    reach: Tensor
    spread: Tensor
    value_reach: Tensor
    value_spread: Tensor

    def gaps(self) -> tuple[Tensor, Tensor]:
        """D_c and E_c of `tangent_atoms`, without rounding."""
        b = self.reach.clamp_max(300.0)
        bennett = torch.where(b > 1e-3, (b.expm1() - b) / b.square().clamp_min(1e-9), 0.5 + b / 6)
        slope = torch.where(b > 1e-6, b.expm1() / b.clamp_min(1e-9), 1.0)
        mass = torch.minimum(torch.log1p(self.spread.square() * bennett), torch.minimum(b * b / 2, b))
        return mass, torch.minimum(self.spread * self.value_spread * slope, self.value_reach)


class Partition:
    """Cells of keys, cut until nobody is in the way.

    logits (q, n): what a unit query sees of each key, times the radius of the queries; values (e, n), None
    where they are `ratio` times the logits; logs (n,): logarithms of the weights under the query in the
    middle, None where all are the same.
    """

    def __init__(
        self, logits: Tensor, values: Tensor | None, logs: Tensor | None, ratio: float = 0.0
    ) -> None:
        self.logits, self.values, self.logs, self.ratio = logits, values, logs, ratio
        self.labels = torch.zeros(logits.shape[-1], dtype=torch.long)
        self.count = 1
        self._blame = logits.new_zeros(0)
        self._middle, self._direction = logits[:, :0], logits[:, :0]
        self._largest = max(float(logits.amax()), -float(logits.amin()))

    def proportions(self) -> tuple[float, float]:
        """The radius of the values, and their spread over that of the logits."""
        values = self.logits if self.values is None else self.values
        middle = 0.5 * (values.amax(-1) + values.amin(-1))
        radius = float(squares(values - middle.unsqueeze(-1)).amax().sqrt())
        if self.values is None:
            return self.ratio * radius, self.ratio
        wide = max(float(self.logits.std(-1, correction=0).amax()), 1e-300)
        return radius, float(values.std(-1, correction=0).amax()) / wide

    def on_grid(self, side: float) -> None:
        """Begin with the cells of a grid, where there are many keys for each."""
        low = self.logits.amin(-1)
        sizes = ((self.logits.amax(-1) - low) / side).floor().long() + 1
        if 8 * math.prod(sizes.tolist()) > len(self.labels):
            return
        key = torch.zeros_like(self.labels)
        for row, least, size in zip(self.logits, low, sizes, strict=True):
            key.mul_(size).add_((row - least).div_(side).long())
        used = torch.bincount(key) > 0
        self.labels = (used.cumsum(0) - 1).index_select(0, key)
        self.count = int(used.sum())

    def cut_until(self, criterion: Criterion, limit: float, most: int) -> float:
        """Cut every cell whose blame is above the limit, as long as there are at most `most`; the largest
        blame that is left.
        """
        active = torch.arange(self.count)
        while len(active) and self.count <= most:
            active = self._round(active, criterion, lambda blame: blame > limit)
        return float(self._blame.amax())

    def cut_into(self, criterion: Criterion, size: int) -> None:
        """Cut the cells that are most in the way until there are so many, or none can be cut."""
        active = torch.arange(self.count)
        while self.count < size and len(active):
            active = self._round(active, criterion, partial(_worst, room=size - self.count))

    def _round(self, active: Tensor, criterion: Criterion, chosen: Callable[[Tensor], Tensor]) -> Tensor:
        """Look at the cells that changed, choose among all, cut them; the cells that changed."""
        self._look(active, criterion)
        return self._split(chosen(self._blame).nonzero()[:, 0])

    def _look(self, active: Tensor, criterion: Criterion) -> None:
        """Blame, middle and direction of some cells."""
        where, local = self._members(active)
        sizes = torch.bincount(local, minlength=len(active))
        masses = self._masses(where, local, len(active))
        reach, spread, middle, direction = _width(masses, _at(self.logits, where), local, sizes)
        value_reach, value_spread = self.ratio * reach, self.ratio * spread
        if self.values is not None:
            value_reach, value_spread, *_ = _width(masses, _at(self.values, where), local, sizes)
        flat = reach <= SMALLEST * (1 + self._largest)
        blame = torch.where(flat, 0.0, criterion(Widths(reach, spread, value_reach, value_spread)))
        self._keep(active, blame, middle, direction)

    def _masses(self, where: Tensor | slice, local: Tensor, count: int) -> Tensor | None:
        """The law of each cell, None where it is the uniform one."""
        if self.logs is None:
            return None
        logs = _at(self.logs, where)
        masses = (logs - spread_out(largest_in(logs, local, count), local)).exp_()
        return masses / spread_out(sums_in(masses, local, count), local)

    def _keep(self, active: Tensor, blame: Tensor, middle: Tensor, direction: Tensor) -> None:
        self._blame = self._with(self._blame, active, blame)
        self._middle = self._with(self._middle, active, middle)
        self._direction = self._with(self._direction, active, direction)

    def _with(self, known: Tensor, active: Tensor, found: Tensor) -> Tensor:
        whole = found.new_zeros(*found.shape[:-1], self.count)
        whole[..., : known.shape[-1]] = known
        whole[..., active] = found
        return whole

    def _split(self, cells: Tensor) -> Tensor:
        if not len(cells):
            return cells
        where, local = self._members(cells)
        away = _at(self.logits, where) - spread_out(self._middle[:, cells], local)
        side = (away * spread_out(self._direction[:, cells], local)).sum(0) > 0
        new = self.count + torch.arange(len(cells))
        self.labels[where] = torch.where(side, spread_out(new, local), spread_out(cells, local))
        self.count += len(cells)
        kept = torch.bincount(self.labels, minlength=self.count)
        whole = (kept[new] == 0) | (kept[cells] == 0)  # all on one side of their middle, by rounding
        self._blame[cells[whole]] = 0.0
        self._blame = torch.cat([self._blame, self._blame.new_zeros(len(cells))])
        return torch.cat([cells[~whole], new[~whole]])

    def _members(self, cells: Tensor) -> tuple[Tensor | slice, Tensor]:
        """The keys of some cells, and which of these each is in."""
        if len(cells) == self.count:
            return slice(None), self.labels
        number = torch.full((self.count,), -1, dtype=torch.long)
        number[cells] = torch.arange(len(cells))
        local = spread_out(number, self.labels)
        where = (local >= 0).nonzero()[:, 0]
        return where, local[where]

    def compact(self) -> Tensor:
        """Labels 0, 1, … without gaps."""
        used = torch.bincount(self.labels, minlength=self.count) > 0
        return (used.cumsum(0) - 1).index_select(0, self.labels)


def _worst(blame: Tensor, room: int) -> Tensor:
    """The worst cells, those within a factor of two of the worst, no more than there is room for."""
    largest = blame.amax()
    if not float(largest) > 0:
        return torch.zeros_like(blame, dtype=torch.bool)
    order = blame.argsort(descending=True)[:room]
    found = torch.zeros_like(blame, dtype=torch.bool)
    found[order] = True
    return found & (blame >= 0.5 * largest)


def _at(values: Tensor, where: Tensor | slice) -> Tensor:
    return values if isinstance(where, slice) else spread_out(values, where)


def _width(masses: Tensor | None, columns: Tensor, labels: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
    """Of each cell the largest distance from the middle, the root of the largest variance, the middle, and
    the direction of that variance: an eigenvector, or a coordinate where there are many.
    """
    middle = means_in(masses, columns, labels, sizes)
    away = away_from(middle, columns, labels)
    reach = largest_in(squares(away), labels, len(sizes), 0.0).sqrt()
    if len(columns) <= FEW:
        values, vectors = torch.linalg.eigh(covariances(masses, away, labels, sizes))
        return reach, values[:, -1].clamp_min(0).sqrt(), middle, vectors[:, :, -1].mT
    variances = means_in(masses, away.square(), labels, sizes)
    direction = torch.nn.functional.one_hot(variances.argmax(0), len(columns)).to(away).mT
    return reach, variances.sum(0).sqrt(), middle, direction


# Clusters


def cluster(features: Tensor, weights: Tensor, size: int, rounds: int = 8) -> Tensor:
    """Labels (n,) of at most `size` clusters: begun far from each other, by weight, then k-means."""
    centers = features[_far_apart(features, weights, size)]
    for _ in range(rounds):
        labels = _nearest(features, centers)
        totals = sums_in(weights, labels, len(centers))
        means = torch.zeros_like(centers).index_add_(0, labels, weights.unsqueeze(-1) * features)
        filled = totals > 0
        centers = torch.where(filled.unsqueeze(-1), means / totals.clamp_min(1e-300).unsqueeze(-1), centers)
    return torch.unique(_nearest(features, centers), return_inverse=True)[1]


def _far_apart(features: Tensor, weights: Tensor, size: int) -> Tensor:
    """Greedily the feature with the largest weight times squared distance from those chosen: copies of a
    heavy one are not chosen.
    """
    first = int(weights.argmax())
    nearest = (features - features[first]).square().sum(-1)
    chosen = [first]
    for _ in range(size - 1):
        blame = weights * nearest
        best = int(blame.argmax())
        if not float(blame[best]) > 0:
            break
        chosen.append(best)
        nearest = torch.minimum(nearest, (features - features[best]).square().sum(-1))
    return torch.tensor(chosen)


def _nearest(features: Tensor, centers: Tensor) -> Tensor:
    squares = centers.square().sum(-1)
    found = [
        (squares - 2 * block @ centers.mT).argmin(-1)
        for block in features.split(max(1, 8_000_000 // max(1, len(centers))))
    ]
    return torch.cat(found)
