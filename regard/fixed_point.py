"""Fixed points of maps, as a map of what is injected."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.attention import Attention
from regard.errors import ArgumentError
from regard.maps import Map, Mapping
from regard.parameters import part


@dataclass(frozen=True, eq=False, repr=False)
class FixedPoint(Map):
    """u ↦ z with z = f(z) + u: a network of infinitely many equal layers that all see the input (bai2019).

    Run as it is written down: `steps` times z ← f(z) + u, starting at z = u. Where f is a contraction this
    comes as close to the fixed point as one likes, and every number of steps has the same constant.

    Examples:
        >>> from regard.maps import Affine
        >>> half = regard.fixed_point.FixedPoint(Affine(0.5 * torch.eye(1)))
        >>> half(torch.ones(1, 1)).tolist()  # z = z/2 + 1
        [[2.0]]
    """

    map: Mapping = part()
    steps: int = 100

    def __post_init__(self) -> None:
        if not isinstance(self.map, (Map, Attention)):
            found = f"is a {type(self.map).__name__}"
            raise ArgumentError("map", found, "give a map of regard.maps or an Attention")
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise ArgumentError("steps", f"is {self.steps!r}", "give a whole number of at least 1")

    def __call__(self, x: Tensor) -> Tensor:
        value = x
        for _ in range(self.steps):
            step = self.map(value)
            if step.shape != x.shape:
                found = f"takes {list(value.shape)} to {list(step.shape)}"
                raise ArgumentError("map", found, "a fixed point needs a map that keeps the shape")
            value = step + x
        return value
