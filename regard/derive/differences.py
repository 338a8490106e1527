"""Whether a derivative is that of the map: it is compared with differences of the map's values.

Autograd differentiates the program, and not what it computes: `detach`, `no_grad` or a wrong backward pass
leave a part of the derivative out. With d± = ±(f(x ± h t) - f(x))/h a derivative J t is between d₊ and d₋
where f has a kink, so that |J t - (d₊ + d₋)/2| ≤ |d₊ - d₋|/2, entry by entry, up to rounding and h².
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

DIRECTIONS = 2
"""Random directions in which values are compared."""
APART = 1e-3
"""The largest difference, as a share of the change, that steps and rounding are taken to explain."""
STEPS = (6e-6, 1e-3, 1e-4, 1e-7, 1e-8)
"""Steps as shares of the largest entry of the point. Float64 throughout agrees at the first; what rounds more
needs larger ones, and what bends more needs smaller ones.
"""


def disagreement(
    run: Callable[[Tensor], Tensor], point: Tensor, value: Tensor, push: Callable[[Tensor], Tensor]
) -> float:
    """The largest difference between J t and differences of values, as a share of their size, over random t.

    Two runs for each direction where both agree at the first step, and rounding is small there.
    """
    generator = torch.Generator(point.device).manual_seed(0)
    largest = float(point.abs().max())
    size = largest if 0 < largest < math.inf else 1.0
    worst = 0.0
    for _ in range(DIRECTIONS):
        t = torch.randn(point.shape, generator=generator, dtype=point.dtype, device=point.device)
        slope, found = push(t), math.inf
        for share in STEPS:
            h = share * size
            found = min(found, _apart(slope, value, run(point + h * t), run(point - h * t), h, share))
            if found <= APART:
                break
        worst = max(worst, found)
    return worst


def _apart(slope: Tensor, value: Tensor, ahead: Tensor, behind: Tensor, h: float, share: float) -> float:
    """What neither a kink nor rounding explains, as a share of the larger change; ∞ for a step so small that
    rounding could explain a difference of `APART`, which a larger one shows.
    """
    middle = (ahead - behind) / (2 * h)
    kink = (ahead - 2 * value + behind).abs() / (2 * h)
    known = middle.isfinite() & kink.isfinite() & slope.isfinite()
    excess = ((middle - slope).abs() - kink).where(known, 0.0).amax()
    lost = 16 * torch.finfo(value.dtype).eps * value.where(known, 0.0).abs().amax() / h
    change = torch.maximum(middle.where(known, 0.0).abs().amax(), slope.where(known, 0.0).abs().amax())
    if share < max(STEPS) and not float(lost) <= APART * float(change):
        return math.inf
    return max(0.0, float(excess - lost)) / max(float(change), math.ulp(0.0))
