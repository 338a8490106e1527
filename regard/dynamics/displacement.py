"""Displacement: what a map moves, as a field."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.errors import ArgumentError
from regard.maps import Map, Mapping, _mapping
from regard.parameters import part


@dataclass(frozen=True, eq=False, repr=False)
class Displacement(Map):
    """x ↦ f(x) - x: its flow is mean shift for Gaussian scores, and one Euler step of length 1 is f.

    Examples:
        >>> attention, x = regard.Attention(regard.Dot()), torch.randn(4, 2)
        >>> torch.equal(regard.dynamics.Displacement(attention)(x), attention(x) - x)
        True
    """

    map: Mapping = part()

    def __post_init__(self) -> None:
        _mapping("map", self.map)

    def __call__(self, x: Tensor) -> Tensor:
        value = self.map(x)
        if value.shape != x.shape:
            found = f"takes {list(x.shape)} to {list(value.shape)}"
            raise ArgumentError("map", found, "a displacement needs a map that keeps the shape")
        return value - x
