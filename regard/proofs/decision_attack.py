"""Attacks on decisions: moves of an input, as short as can be found, after which another logit leads; and
inputs of a domain where the label leads least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._enclosed import lengths
from regard._verb import Verb
from regard.domains import Box, Hull, Near, Neighborhood, Radii
from regard.errors import ArgumentError
from regard.norms import EntryMax, Frobenius, SequenceNorm, TokenMax, TokenSum
from regard.proofs.classifier import Classifier
from regard.proofs.falsification import Witness
from regard.proofs.places import farthest, project, units


class ShortestChange:
    """Moves that are as short as can be found and change the decision."""

    def __init__(self, whole: Any, label: Tensor, norm: SequenceNorm, token: int | None) -> None:
        self.whole, self.label, self.norm, self.token = whole, label.unsqueeze(-1), norm, token

    def find(self, points: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Straight to the boundary as the gradient sees it, then along shorter and shorter spheres."""
        move = self._straight(points, steps)
        best, moved = self._cut(points, move)
        size = torch.where(best.isfinite(), best, self.norm.of(move))
        move = moved - points
        for _ in range(steps):
            leaf = (points + move).requires_grad_()
            margin = self._margin(leaf)
            (uphill,) = torch.autograd.grad(margin.sum(), leaf)
            length = torch.where(margin.detach() < 0, self.norm.of(leaf.detach() - points), math.inf)
            moved = torch.where(_wide(length < best), leaf.detach(), moved)
            best, size = torch.minimum(best, length), torch.minimum(size, length)
            move = move - 0.3 * _wide(size) * self._steepest(uphill)
            move = move * _wide(0.98 * size / self.norm.of(move).clamp_min(1e-300))
        return best, moved

    def _straight(self, points: Tensor, steps: int) -> Tensor:
        move = torch.zeros_like(points)
        for _ in range(steps):
            leaf = (points + move).requires_grad_()
            margin = self._margin(leaf)
            (uphill,) = torch.autograd.grad(margin.sum(), leaf)
            rate = self._rate(uphill).clamp_min(1e-12)
            need = torch.where(margin > 0, margin.detach() / rate * 1.02 + 1e-9, 0.0)
            move = move - _wide(need.clamp_max(1e3)) * self._steepest(uphill)
        return move

    def _cut(self, points: Tensor, move: Tensor) -> tuple[Tensor, Tensor]:
        """The shortest part of each move that changes the decision, by bisection; ∞ where all of it does
        not.
        """
        changed = self._margin(points + move) < 0
        low, high = (
            torch.zeros_like(changed, dtype=points.dtype),
            torch.ones_like(changed, dtype=points.dtype),
        )
        for _ in range(12):
            middle = (low + high) / 2
            over = self._margin(points + _wide(middle) * move) < 0
            low, high = torch.where(over, low, middle), torch.where(over, middle, high)
        moved = points + _wide(high) * move
        return torch.where(changed, self.norm.of(moved - points), math.inf), moved

    def _margin(self, points: Tensor) -> Tensor:
        return leads_of(self.whole(points).squeeze(-2), self.label)

    def _allowed(self, z: Tensor) -> Tensor:
        if self.token is None:
            return z
        kept = torch.zeros_like(z)
        kept[..., self.token, :] = z[..., self.token, :]
        return kept

    def _steepest(self, uphill: Tensor) -> Tensor:
        """The move of norm one along which the margin grows fastest."""
        z = self._allowed(uphill)
        if isinstance(self.norm, TokenMax):
            return units(z)
        if isinstance(self.norm, EntryMax):
            return z.sign()
        if isinstance(self.norm, TokenSum):
            lengths = z.norm(dim=-1)
            first = torch.nn.functional.one_hot(lengths.argmax(-1), lengths.shape[-1]).unsqueeze(-1)
            return first * units(z)
        return z / torch.linalg.vector_norm(z, dim=(-2, -1), keepdim=True).clamp_min(1e-300)

    def _rate(self, uphill: Tensor) -> Tensor:
        """How fast the margin grows along it."""
        return (self._allowed(uphill) * self._steepest(uphill)).sum((-2, -1))


def _wide(values: Tensor) -> Tensor:
    """One number for each sequence, against tokens."""
    return values[..., None, None]


inside = Verb("inside")
"""inside.one(domain, x) -> whether a point is certainly in a neighborhood, rounding included."""


@inside.rule(Radii)
def _inside_radii(domain: Radii, x: Tensor) -> bool:
    away = lengths(x.double() - domain.measure.points, 1).bound
    return bool(((away <= domain.radii.double()) | (x.double() == domain.measure.points).all(-1)).all())


@inside.rule(Box)
def _inside_box(domain: Box, x: Tensor) -> bool:
    away = (x.double() - domain.measure.points).abs() * (1 + 2.0**-52)
    return bool((away <= domain.radii.double().unsqueeze(-1)).all())


@inside.rule(Neighborhood)
def _inside_neighborhood(domain: Neighborhood, x: Tensor) -> bool:
    away = x.double() - domain.measure.points
    rows = away.flatten().unsqueeze(0) if isinstance(domain.norm, Frobenius) else away
    return bool((lengths(rows, 1).bound <= domain.radius).all()) or bool((away == 0).all())


@inside.rule(Hull)
def _inside_hull(domain: Hull, x: Tensor) -> bool:
    """A corner: what is between them cannot be told from what is beside them in floating point."""
    others = torch.arange(len(x)) != domain.token % len(x)
    still = bool((x.double()[others] == domain.measure.points[others]).all())
    return still and bool((domain.corners == x.double()[domain.token]).all(-1).any())


@dataclass(frozen=True)
class Found:
    """The input where the label leads least, and whether another class leads there as the model runs."""

    witness: Witness
    changed: bool


class LeastMargin:
    """Inputs of a domain where a label leads as little as can be found."""

    def __init__(self, classifier: Classifier, domain: Near, labels: tuple[int, ...]) -> None:
        self.classifier, self.domain, self.labels = classifier, domain, labels
        self.points = domain.measure.points

    def find(self, steps: int) -> Found:
        """From the input itself down the gradient, to the farthest point along it and halfway there."""
        best, at = float(self._lead(self.points)), self.points
        corners = self._corners()
        starts = [self.points] if not corners else [corners[0]]
        for corner in corners:
            best, at = self._better(best, at, corner)
        for begin in starts:
            x = begin
            for step in range(steps):
                try:
                    aim = farthest.one(self.domain, -self._slope(x))
                    x = aim if step % 2 == 0 else project.one(self.domain, 0.5 * (x + aim))
                    best, at = self._better(best, at, x)
                except ArgumentError:  # numbers of the map leave float64 on so large a domain
                    break
                if best < 0 and self._changed(at):
                    break
        return self._found(at)

    def _corners(self) -> list[Tensor]:
        if not isinstance(self.domain, Hull):
            return []
        found = []
        for corner in self.domain.corners:
            x = self.points.clone()
            x[self.domain.token] = corner
            found.append(x)
        return sorted(found, key=lambda x: float(self._lead(x)))

    def _better(self, best: float, at: Tensor, x: Tensor) -> tuple[float, Tensor]:
        lead = float(self._lead(x))
        return (lead, x) if lead < best else (best, at)

    def _lead(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return lead(self.classifier.logits(x), self.labels)

    def _slope(self, x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(lead(self.classifier.logits(leaf), self.labels), leaf)
        return slope

    def _own(self, x: Tensor) -> Tensor:
        return as_it_runs(self.classifier, self.domain, x)

    def _changed(self, x: Tensor) -> bool:
        own = self._own(x)
        exactly = bool((own.double() == self.points).all()) or inside.one(self.domain, own)
        return exactly and bool(lead(self.classifier.run(own), self.labels) < 0)

    def _found(self, x: Tensor) -> Found:
        own = self._own(x)
        changed = self._changed(x)
        value = float(lead(self.classifier.run(own).double(), self.labels))
        if math.isnan(value) and own is not self.points:  # beyond the numbers of its dtype
            return self._found(self.points)
        return Found(Witness(value, self.points, own.double(), Frobenius()), changed)


def as_it_runs(found: Classifier, domain: Near, x: Tensor) -> Tensor:
    """An input as the model's dtype has it, drawn in until it is certainly in the domain."""
    points = domain.measure.points
    for shrink in (0.0, 1e-12, 1e-9, 1e-6, 1e-4):
        moved = (x + shrink * (points - x)).to(found.dtype)
        if inside.one(domain, moved):
            return moved
    return points.to(found.dtype)


def leads_of(logits: Tensor, label: Tensor) -> Tensor:
    """By how much the label (..., 1) of each row of logits (..., classes) leads the largest of the others."""
    own = logits.gather(-1, label).squeeze(-1)
    return own - logits.scatter(-1, label, -math.inf).amax(-1)


def lead(logits: Tensor, labels: tuple[int, ...]) -> Tensor:
    """By how much the least of the labels leads the largest of all other classes."""
    chosen = torch.tensor(labels)
    return logits[..., chosen].amin(-1) - logits.index_fill(-1, chosen, -math.inf).amax(-1)
