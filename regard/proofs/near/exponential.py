"""Tails of the exponential series, from above."""

from __future__ import annotations

import torch

from regard._upper import ELEMENTARY, TINY, Upper, exact, exact_lower

SMALL = 0.5
"""Below this a tail is summed as a series; above it, the difference has its digits."""


def tail(x: Upper, order: int) -> Upper:
    """φ₂ = eˣ - 1 - x or φ₃ = φ₂ - x²/2.

    Below `SMALL`: Σ_{j=m}^{m+13} xʲ/j!, and the rest is at most its first term. Above, eˣ is at least the sum
    of three terms and what is left of it is more than a hundredth, so that the rounding of eˣ is at most a
    hundred times as large relative to it.
    """
    at = x.bound
    small = at < SMALL
    near = torch.where(small, at, 0.0)
    term = near**order / (2.0 if order == 2 else 6.0)
    series = torch.zeros_like(at)
    for k in range(order + 1, order + 14):
        series = series + term
        term = term * near / k
    series = torch.where(near > 0, (series + 2 * term).clamp_min(TINY), 0.0)
    direct = torch.expm1(at) - at - (0.0 if order == 2 else 0.5 * at * at)
    return Upper(torch.where(small, series, direct), 200 * ELEMENTARY)


def tail_over_square(x: Upper, order: int) -> Upper:
    """φ₂(x)/x² or φ₃(x)/x², which grow with x; at zero they are 1/2 and 0."""
    at = x.bound.clamp_min(1e-100)
    return tail(exact(at), order) / exact_lower(at).square()


def steepness(x: Upper) -> Upper:
    """(eˣ - 1)/x, which grows with x from one."""
    at = x.bound.clamp_min(1e-100)
    return exact(at).expm1() / exact_lower(at)
