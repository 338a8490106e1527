"""How far weights of softmax rows can go: e^a/Z for moves a of scores about their mean under the law P (M7).

Σ P a = 0, so all other keys have the mean -P_ja_j/(1 - P_j), and by Jensen's inequality

    Z = Σ P e^a ≥ P_j e^{a_j} + (1 - P_j) e^{-P_ja_j/(1 - P_j)} ≥ 1.

So e^{a_j}/Z is at most a logistic function of a_j, where e^{a_j} alone would grow without end. In what
follows p is a number that is at most P_j: the sum above grows with it. All functions are of numbers, entry by
entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard._upper import ELEMENTARY, UNIT, Lower, Upper, exact, exact_lower

SIXTH = Upper(1 / 6, 1)
BULGE = 1e6
"""No κ need be larger: such a key has nearly all weight, and its score does not move."""
STEPS = 6
"""Of Newton's method, for places of maxima; nothing is taken on trust of them."""


def grown(p: Lower, move: Upper) -> Upper:
    """At least e^a/Z for a ≤ move: 1/(p + (1-p) e^{-a/(1-p)})."""
    left = 1 - Upper(p.bound)
    return exact(1.0) / (p + left * (move / left).exp_minus())


def excess(p: Lower, move: Upper) -> Upper:
    """At least e^a/Z - 1 - a for 0 ≤ a ≤ move.

    The logistic function is steeper than 1 between 0 and a* = 2(1-p) log((1-p)/p), where it is (1-p)/p;
    from p = 1/2 on nowhere.
    """
    number, far = p.bound, move.bound
    other = (1 - number).clamp_min(0.0)
    steep = torch.log(other / number.clamp_min(1e-300)).clamp_min(0.0)
    peak = Upper(other, 1) / Lower(number) - (
        exact_lower(1.0) + 2 * Lower(other, 1) * Lower(steep, 2 * ELEMENTARY)
    )
    before = far <= 2 * other * steep * (1 - 1e-9)
    end = beyond_linear(move).minimum(grown(p, move) - (1 + Lower(far)))
    later = torch.where(number < 0.5, peak.bound, 0.0)
    return Upper(torch.where(before, end.bound, later))


def bulge(p: Lower, far: Tensor, sign: int) -> Tensor:
    """κ with Z ≥ 1 + κa²/2 for 0 ≤ ±a ≤ far.

    Taylor's formula for both exponentials: Z ≥ 1 + (k a²/2)(1 + (1-p)(1-k²)a/3), k = p/(1-p).
    """
    number = p.bound
    ratio = Lower(number) / (exact(1.0) - Lower(number))
    if sign > 0:
        above = Upper(number) / (1 - Upper(number))
        bent = above.square() - exact_lower(1.0)
    else:
        bent = exact(1.0) - ratio.square()
    bent = Upper(torch.nan_to_num(bent.bound, nan=torch.inf)) * (exact(1.0) - Lower(number)) / 3
    kept: Lower = 1 - bent * Upper(far)
    return (ratio * kept).bound.clamp_max(BULGE)


def cubic(kappa: Tensor, far: Tensor, end: Upper, sign: int) -> Upper:
    """At least ±[(e^a - 1)/Z - a - a²/2] for 0 ≤ ±a ≤ far and Z ≥ 1 + κa²/2.

    With c(a) = |e^a - 1 - a - a²/2|/|a|³, which is convex, 1/6 at 0 and at most `end` at the other end, it is
    at most |a|³ (c - κ/2 ∓ κ|a|/4)/(1 + κa²/2), where the bracket is largest at an end and the rest grows.
    """
    half, length = Lower(kappa).halved(), Upper(far)
    if sign > 0:
        last = end - (half + Lower(kappa) * Lower(far) / 4)
    else:
        last = (end + Upper(kappa) * length / 4) - half
    most = (SIXTH - half).maximum(last)
    return length.square() * length * most / (1 + (Lower(kappa) * Lower(far).square()).halved())


def rising_cube(far: Tensor) -> Upper:
    """At least (e^t - 1 - t - t²/2)/t³, which is at most e^t/6."""
    t, low = Upper(far), Lower(far)
    direct = (t.expm1() - (low + low.square().halved())) / (low.square() * low)
    return (t.exp() / 6).minimum(direct.map(lambda value: torch.where(far > 1e-2, value, torch.inf)))


def falling_cube(far: Tensor) -> Upper:
    """At least (1 - t + t²/2 - e^{-t})/t³: 1/6 - t/24 + t²/120, by Taylor's formula."""
    t = Upper(far)
    return SIXTH.minimum((SIXTH + t.square() / 120) - Lower(far) / 24)


def largest_fall(share: Tensor, far: Tensor) -> Upper:
    """At least s(1 - e^{-t}) - (1 - t + t²/2 - e^{-t}) for 0 ≤ t ≤ far: concave, with the slope
    1 - t - (1-s) e^{-t}, and so below its tangent at any t.
    """
    t = (2 * share).sqrt().clamp_max(1.0)
    for _ in range(STEPS):
        slope = 1 - t - (1 - share) * torch.exp(-t)
        t = (t + slope / (1 - (1 - share) * torch.exp(-t)).clamp_min(1e-12)).clamp(0.0, 1.0)
    t = torch.minimum(torch.nan_to_num(t), far)
    low = Lower(t)
    less = low.square() * low / 6 * (1 - (Upper(t) / 4 + Upper(t) * Upper(t).square() / 120))
    value = Upper(share) * Upper((-torch.expm1(-t)).clamp_min(0.0), ELEMENTARY) - less
    slope = 1 - t - (1 - share) * torch.exp(-t)
    return value + _tangent(slope, 64 * UNIT * torch.ones_like(t), t, far)


def largest_rise(share: Tensor, far: Tensor) -> Upper:
    """At least s(e^a - 1) - (e^a - 1 - a - a²/2) for 0 ≤ a ≤ far, s < 1: its slope 1 + a - (1-s) e^a is not
    negative up to log 1/(1-s), and it is concave from there on, below its tangent at any a.
    """
    whole = -torch.log1p(-share.clamp_max(1 - 1e-15))
    w = (2 * whole).sqrt()
    for _ in range(STEPS):
        w = (w - (torch.expm1(w) - w - whole) / torch.expm1(w).clamp_min(1e-150)).clamp_min(0.0)
    t = torch.minimum(torch.nan_to_num(whole + w, posinf=1e300), far)
    low = Lower(t)
    series = low.square() * low / 6 * (1 + low / 4 + low.square() / 20)
    direct = Lower(torch.expm1(t), ELEMENTARY) - (Upper(t) + Upper(t).square().halved())
    value = Upper(share) * Upper(t).expm1() - series.maximum(direct)
    slope = 1 + t - (1 - share) * torch.exp(t)
    found = value + _tangent(slope, 64 * UNIT * (1 + torch.exp(t)), t, far)
    return Upper(torch.where(share < 1 - 1e-14, found.bound, torch.inf))


def _tangent(slope: Tensor, error: Tensor, t: Tensor, far: Tensor) -> Upper:
    """At least how far a tangent at t, whose slope is off by `error`, rises on [0, far]."""
    ahead = Upper(slope.clamp_min(0.0) + error, 1) * Upper((far - t).clamp_min(0.0), 1)
    behind = Upper((-slope).clamp_min(0.0) + error, 1) * Upper(t)
    return ahead.maximum(behind)


def beyond_linear(t: Upper) -> Upper:
    """At least e^t - 1 - t; t² e^t/2 where that has more digits."""
    small = t.square().halved() * t.exp()
    return small.minimum(t.expm1() - Lower(t.bound))
