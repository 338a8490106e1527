"""Tails of the exponential series, from above."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.certify.near.matrix_norms import MARGIN


def exponential_tail(x: Tensor, order: int) -> Tensor:
    """φ₂ = eˣ - 1 - x or φ₃ = φ₂ - x²/2, from above, without cancellation near zero."""
    small = x < 0.5
    near = torch.where(small, x, torch.zeros_like(x))
    series = torch.zeros_like(x)
    term = near**order / (2.0 if order == 2 else 6.0)
    for k in range(order + 1, order + 14):
        series = series + term
        term = term * near / k
    direct = torch.expm1(x) - x - (0.0 if order == 2 else 0.5 * x * x)
    return torch.where(small, series + 2 * term, direct) * MARGIN


def quotient(x: Tensor, order: int, power: int) -> Tensor:
    """φ_order(x)/x^power, continued to zero."""
    safe = x.clamp_min(1e-150)
    limit = torch.full_like(x, 0.5 if order == power == 2 else 0.0)
    return torch.where(x > 1e-100, exponential_tail(safe, order) / safe**power, limit) * MARGIN
