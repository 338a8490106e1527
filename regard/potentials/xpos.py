"""Rotary positions that fade with the distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard import _check
from regard._types import Features
from regard.errors import ArgumentError
from regard.parameters import part
from regard.potentials.base import Potential
from regard.potentials.dot import Dot
from regard.potentials.positions import Rotary
from regard.potentials.reductions import Reduction, Refused, reduce

LARGEST = {torch.float32: 80.0, torch.float64: 700.0}
"""Exponents up to which e^x is a number of that kind."""


@dataclass(frozen=True, eq=False, repr=False)
class XPos(Potential):
    """Σ_i ζ_i^((s - t)/reach) q_iᵀ R_i(s - t) k_i over pairs of coordinates: rotary dot products that fade as
    the key lies further back, ζ_i = (2i/c + floor)/(1 + floor) (sun2023).

    For causal supports: a key that lies ahead would count the more the farther it is. The released code has
    interleaved=True, where pairs are 2i and 2i + 1; False pairs i with i + c/2.

    Examples:
        >>> x = torch.ones(4, 2)
        >>> fading = regard.potentials.XPos(reach=2.0).scores(x, x)
        >>> bool(fading[3, 0].abs() < fading[3, 3].abs())
        True
    """

    potential: Potential = part(default=Dot())
    base: float = 10000.0
    reach: float = 512.0
    floor: float = 0.4
    interleaved: bool = True
    positional: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("base", "reach", "floor"):
            _check.positive(name, getattr(self, name))
        if not isinstance(self.potential, Dot):
            found = f"is a {type(self.potential).__name__}, and only products fade with the distance"
            raise ArgumentError(
                "potential", found, "give Dot(...), and add other terms to it: XPos() + Alibi(...)"
            )

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        rotary = Rotary(self.potential, base=self.base, interleaved=self.interleaved)
        queries, keys = rotary.features(x, y, x_marks, y_marks)
        if 0 in (x_marks.shape[-1], y_marks.shape[-1]):
            return queries, keys
        fades = self._fades(queries.shape[-1], queries.device)
        origin, kind = self._origin(x_marks, y_marks, fades, queries.dtype)
        queries, keys = queries.to(kind), keys.to(kind)
        return (
            queries * (fades * (x_marks.unsqueeze(-1) - origin)).exp().to(kind),
            keys * (fades * (origin - y_marks.unsqueeze(-1))).exp().to(kind),
        )

    def _fades(self, width: int, device: torch.device) -> Tensor:
        """log ζ / reach of each coordinate, (c,)."""
        pairs = torch.arange(0, width, 2, device=device, dtype=torch.float64) / width
        fades = ((pairs + self.floor) / (1 + self.floor)).log() / self.reach
        return fades.repeat_interleave(2) if self.interleaved else fades.repeat(2)

    def _origin(
        self, x_marks: Tensor, y_marks: Tensor, fades: Tensor, kind: torch.dtype
    ) -> tuple[Tensor, torch.dtype]:
        """A mark in the middle, since only differences count, and a dtype that holds the powers of ζ."""
        low = torch.minimum(x_marks.amin(), y_marks.amin()).double()
        high = torch.maximum(x_marks.amax(), y_marks.amax()).double()
        largest = (high - low) / 2 * fades.abs().amax()
        kind = torch.promote_types(kind, torch.float32)
        if kind == torch.float32 and _check.holds(largest > LARGEST[kind]):
            kind = torch.float64
        if _check.holds(largest > LARGEST[kind]):
            found = f"reach over {float(high - low):g} positions, where powers of ζ overflow"
            raise ArgumentError("marks", found, "give a larger reach=, or attend in windows")
        return (low + high) / 2, kind

    def pair(self, queries: Features, keys: Features) -> Tensor:
        return self.potential.pair(queries, keys)

    def width(self, queries: Features, keys: Features) -> int:
        return self.potential.width(queries, keys)


@reduce.rule(XPos)
def _xpos(potential: XPos, queries: Tensor, keys: Tensor, causal: bool) -> Reduction | Refused:
    """The features are rotated and scaled already."""
    return reduce.one(potential.potential, queries, keys, causal)
