"""Frames: square orthogonal matrices, side by side, from any numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.maps import Affine
from regard.nn.digits import below_one, working


class Frames(nn.Module):
    """x_i ↦ (W_1 x_i, …, W_k x_i), each W orthogonal but for rounding, and its norm at most one.

    W = (I + A - Aᵀ)⁻¹ (I - A + Aᵀ) (Cayley). State: raw (k, d, d), the A.
    """

    bias: None = None

    def __init__(self, width: int, count: int = 1) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.empty(count, width, width))
        nn.init.normal_(self.raw, std=(2 * width) ** -0.5)

    @property
    def weight(self) -> Tensor:
        """(k d, d), in float32 at least."""
        raw = self.raw.to(working(self.raw))
        skew, identity = raw - raw.mT, torch.eye(raw.shape[-1], dtype=raw.dtype, device=raw.device)
        return torch.linalg.solve(identity + skew, identity - skew).flatten(0, 1) * below_one(raw.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens in the numbers of the weight: it is not rounded to theirs, which could make it longer."""
        return nn.functional.linear(x, self.weight)

    def declare(self, factor: float = 1.0) -> Affine:
        """x_i ↦ factor · (W_1 x_i, …), in float64 and cut off."""
        return Affine(self.weight.detach().double().mT.contiguous() * factor)

    def extra_repr(self) -> str:
        return f"{self.raw.shape[-1]}, {len(self.raw)}"
