"""Normed: a norm layer inside attention, on what a projection gives, and what is read of the result."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._heads import project_points
from regard._object import Object
from regard.errors import ArgumentError
from regard.parameters import parameter


@dataclass(frozen=True, eq=False, repr=False)
class Normed(Object):
    """z ↦ uᵀ(gain · ẑ) + shift with ẑ = z/√(mean z² + eps): RMSNorm of projected points (zhang2019).

    gain (r,) and shift (c,) act on coordinates; u (r, c), None for the identity, reads some of them or mixes
    them. A norm that centers is one of a projection that does.

    Examples:
        >>> norm = regard.normed.Normed(eps=1e-12, gain=torch.tensor([1.0, 10.0]))
        >>> norm(torch.tensor([[3.0, 3.0]])).tolist()
        [[1.0, 10.0]]
    """

    eps: float = 1e-6
    gain: Tensor | None = parameter(rank=1, default=None)
    u: Tensor | None = parameter(rank=2, default=None)
    shift: Tensor | None = parameter(rank=1, default=None)

    def __post_init__(self) -> None:
        if not (isinstance(self.eps, (int, float)) and math.isfinite(self.eps) and self.eps > 0):
            raise ArgumentError(
                "eps", f"is {self.eps!r}", "give a positive number: it keeps the norm smooth at zero"
            )
        _check.parameter("gain", self.gain, 1, "(..., r)")
        _check.parameter("u", self.u, 2, "(..., r, c)")
        _check.parameter("shift", self.shift, 1, "(..., c)")
        if self.gain is not None and self.u is not None and self.gain.shape[-1] != self.u.shape[-2]:
            raise ArgumentError(
                "u",
                f"takes width {self.u.shape[-2]} and gain has {self.gain.shape[-1]}",
                "give u (..., r, c) for gain (..., r)",
            )

    def __call__(self, z: Tensor) -> Tensor:
        """The value at projected points (..., n, r)."""
        wide = z.to(torch.promote_types(z.dtype, torch.float32))  # squares leave the range of half precision
        found = (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(z.dtype)
        found = found if self.gain is None else found * self.gain.unsqueeze(-2)
        found = found if self.u is None else project_points(found, self.u)
        return found if self.shift is None else found + self.shift.unsqueeze(-2)

    def width(self, projected: int) -> int:
        """How wide values are, of points of this width."""
        return projected if self.u is None else int(self.u.shape[-1])
