"""Which keys share an atom: cells that are cut where they are widest, or clusters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.proofs.cells import covariances, largest_in, sums_in

Criterion = Callable[["Widths"], Tensor]
"""How much each cell is in the way of a bound, (k,)."""

NARROW = 16
"""Up to this width cells are cut across the direction of their largest spread, beyond along a coordinate."""
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

    logits (n, q): what a unit query sees of each key, times the radius of the queries; values (n, e); logs
    (n,): logarithms of the weights under the query in the middle.
    """

    def __init__(self, logits: Tensor, values: Tensor, logs: Tensor) -> None:
        self.logits, self.values, self.logs = logits, values, logs
        self.labels = torch.zeros(len(logits), dtype=torch.long)
        self.count = 1
        self._blame = logits.new_zeros(0)
        self._middle, self._direction = logits[:0], logits[:0]

    def on_grid(self, side: float) -> None:
        """Begin with the cells of a grid, where that is cheap."""
        low = self.logits.amin(0)
        sizes = ((self.logits.amax(0) - low) / side).floor().long() + 1
        if math.prod(sizes.tolist()) > 4 * len(self.logits):
            return
        cells = ((self.logits - low) / side).floor().long()
        key = cells[:, 0]
        for k in range(1, cells.shape[-1]):
            key = key * sizes[k] + cells[:, k]
        used = torch.bincount(key) > 0
        self.labels = (used.cumsum(0) - 1)[key]
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
            room = size - self.count
            active = self._round(active, criterion, lambda blame: _worst(blame, room))

    def _round(self, active: Tensor, criterion: Criterion, chosen: Callable[[Tensor], Tensor]) -> Tensor:
        """Look at the cells that changed, choose among all, cut them; the cells that changed."""
        self._look(active, criterion)
        return self._split(chosen(self._blame).nonzero()[:, 0])

    def _look(self, active: Tensor, criterion: Criterion) -> None:
        """Blame, middle and direction of some cells."""
        where, local = self._members(active)
        logits, values = self.logits[where], self.values[where]
        count = len(active)
        logs = self.logs[where]
        masses = (logs - largest_in(logs, local, count)[local]).exp()
        masses = masses / sums_in(masses, local, count)[local]
        middle = sums_in(masses.unsqueeze(-1) * logits, local, count)
        away = logits - middle[local]
        spread, direction = _spread(masses, away, local, count)
        value_away = values - sums_in(masses.unsqueeze(-1) * values, local, count)[local]
        widths = Widths(
            largest_in(away.norm(dim=-1), local, count, 0.0),
            spread,
            largest_in(value_away.norm(dim=-1), local, count, 0.0),
            _spread(masses, value_away, local, count)[0],
        )
        flat = widths.reach <= SMALLEST * (1 + self.logits.abs().amax())
        self._keep(active, torch.where(flat, 0.0, criterion(widths)), middle, direction)

    def _keep(self, active: Tensor, blame: Tensor, middle: Tensor, direction: Tensor) -> None:
        self._blame = self._with(self._blame, active, blame)
        self._middle = self._with(self._middle, active, middle)
        self._direction = self._with(self._direction, active, direction)

    def _with(self, known: Tensor, active: Tensor, found: Tensor) -> Tensor:
        whole = found.new_zeros(self.count, *found.shape[1:])
        whole[: len(known)] = known
        whole[active] = found
        return whole

    def _split(self, cells: Tensor) -> Tensor:
        if not len(cells):
            return cells
        where, local = self._members(cells)
        away = self.logits[where] - self._middle[cells][local]
        side = (away * self._direction[cells][local]).sum(-1) > 0
        new = self.count + torch.arange(len(cells))
        self.labels[where] = torch.where(side, new[local], cells[local])
        self.count += len(cells)
        kept = torch.bincount(self.labels, minlength=self.count)
        whole = (kept[new] == 0) | (kept[cells] == 0)  # all on one side of their middle, by rounding
        self._blame[cells[whole]] = 0.0
        self._blame = torch.cat([self._blame, self._blame.new_zeros(len(cells))])
        return torch.cat([cells[~whole], new[~whole]])

    def _members(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """The keys of some cells, and which of these each is in."""
        number = torch.full((self.count,), -1, dtype=torch.long)
        number[cells] = torch.arange(len(cells))
        local = number[self.labels]
        where = (local >= 0).nonzero()[:, 0] if len(cells) < self.count else torch.arange(len(local))
        return where, local[where]

    def compact(self) -> Tensor:
        """Labels 0, 1, … without gaps."""
        used = torch.bincount(self.labels, minlength=self.count) > 0
        return (used.cumsum(0) - 1)[self.labels]


def _worst(blame: Tensor, room: int) -> Tensor:
    """The worst cells, those within a factor of two of the worst, no more than there is room for."""
    largest = blame.amax()
    if not float(largest) > 0:
        return torch.zeros_like(blame, dtype=torch.bool)
    order = blame.argsort(descending=True)[:room]
    found = torch.zeros_like(blame, dtype=torch.bool)
    found[order] = True
    return found & (blame >= 0.5 * largest)


def _spread(masses: Tensor, away: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The root of the largest variance, and its direction."""
    if away.shape[-1] <= NARROW:
        values, vectors = torch.linalg.eigh(covariances(masses, away, labels, count))
        return values[:, -1].clamp_min(0).sqrt(), vectors[:, :, -1]
    variances = sums_in(masses.unsqueeze(-1) * away.square(), labels, count)
    direction = torch.nn.functional.one_hot(variances.argmax(-1), away.shape[-1]).to(away)
    return variances.sum(-1).sqrt(), direction


# Clusters


def cluster(features: Tensor, weights: Tensor, size: int, rounds: int = 8) -> Tensor:
    """Labels (n,) of at most `size` clusters: begun far from each other, by weight, then k-means."""
    centers = features[_far_apart(features, weights, size)]
    for _ in range(rounds):
        labels = _nearest(features, centers)
        totals = sums_in(weights, labels, len(centers))
        means = sums_in(weights.unsqueeze(-1) * features, labels, len(centers))
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
