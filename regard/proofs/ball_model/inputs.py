"""What moves at the input: |u| ≤ 1, of which more is known in parts: balls, boxes, simplices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import UNIT, Upper, exact, exact_lower, relative_error, root, sizes, total


class Part(ABC):
    """A set in the unit ball of `width` coordinates. Abstract."""

    width: int

    @abstractmethod
    def reach(self, slopes: Tensor) -> Upper:
        """At least |a·u| over the set for slopes a (..., width)."""


@dataclass(frozen=True)
class BallPart(Part):
    """|u| ≤ 1."""

    width: int

    def reach(self, slopes: Tensor) -> Upper:
        return computed_lengths(slopes)


@dataclass(frozen=True)
class BoxPart(Part):
    """|u_k| ≤ d^{-1/2}."""

    width: int

    def reach(self, slopes: Tensor) -> Upper:
        along = sizes(slopes).sum(-1) / exact_lower(float(self.width)).sqrt()
        return computed_lengths(slopes).minimum(along)


@dataclass(frozen=True)
class SimplexPart(Part):
    """u = (K/(K-1))^{1/2} (λ - 1/K) for λ of a simplex with K corners."""

    width: int

    def reach(self, slopes: Tensor) -> Upper:
        away = slopes - slopes.mean(-1, keepdim=True)
        rounding = relative_error(self.width + 4) * sizes(slopes).amax(-1)
        stretch = (exact(float(self.width)) / exact_lower(float(max(self.width - 1, 1)))).sqrt()
        return computed_lengths(slopes).minimum(stretch * (sizes(away).amax(-1) + rounding))


@dataclass(frozen=True)
class Inputs:
    """u = (ω_b u_b)_b with u_b in the sets of `parts` and Σ ω_b² ≤ 1, so that |u| ≤ 1."""

    parts: tuple[Part, ...]
    shares: tuple[float, ...]

    @property
    def width(self) -> int:
        """How many coordinates u has."""
        return sum(part.width for part in self.parts)

    def reach(self, slopes: Tensor) -> Upper:
        """At least |a·u| for slopes a (..., width)."""
        if not self.parts:
            return Upper(slopes.new_zeros(slopes.shape[:-1]))
        pieces = slopes.split([part.width for part in self.parts], -1)
        along = [
            exact(share) * part.reach(piece)
            for share, part, piece in zip(self.shares, self.parts, pieces, strict=True)
        ]
        return along[0] if len(along) == 1 else total(along).minimum(computed_lengths(slopes))


def shares_of(radii: list[float]) -> tuple[float, ...]:
    """ω_b with Σ ω_b² ≤ 1, larger for parts that move farther; exactly one for a single part."""
    if len(radii) == 1:
        return (1.0,)
    whole, below = math.fsum(radii), 1 - 32 * UNIT
    return tuple(math.sqrt(radius / whole) * below for radius in radii)


def stretched(radius: float, share: float, width: int | None = None) -> float:
    """At least radius/ω, and √width times that for a box."""
    found = exact(radius) if width is None else exact(radius) * root(width)
    return float(found / exact_lower(share)) if share != 1.0 or width is not None else radius


def identity_columns(width: int) -> Tensor:
    """The derivative of a token by its own move."""
    return torch.eye(width, dtype=torch.float64)
