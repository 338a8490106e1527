"""Activations at numbers, with their derivatives, and what is beyond the second order on an interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from regard import maps
from regard._upper import ELEMENTARY, UNIT, Upper, exact, sizes
from regard._verb import Verb
from regard.proofs.theorem import Refusal
from regard.proofs.tokenwise import steepness


@dataclass(frozen=True)
class Bend:
    """φ(h + s) = value + slope s + second s²/2 + r with |r - middle| ≤ `beyond` where |s| ≤ reach, entry by
    entry; where φ is smooth, |r| ≤ third |s|³/6 too.

    steep: |φ(h + s) - φ(h) - slope s| ≤ steep |s|. error: how far value, slope and second may be off.
    """

    value: Tensor
    slope: Tensor
    second: Tensor
    third: Upper
    middle: Tensor
    beyond: Upper
    steep: Upper
    error: Upper


bend = Verb("bend")
"""bend.one(activation, h, reach) -> Bend, for arguments within `reach` of h."""


@bend.rule(maps.Activation)
def _unknown(activation: maps.Activation, h: Tensor, reach: Upper) -> Bend:
    name = type(activation).__name__
    raise Refusal(f"{name} has no ball model; say its derivatives with @bend.rule({name})")


Jets = tuple[Tensor, Tensor, Tensor, Tensor]
"""φ, φ', φ'', φ''' at numbers."""


@dataclass(frozen=True)
class Smooth:
    """An activation with its derivatives. fourth: at least max |φ''''|. peaks: where |φ'''| has its maxima,
    right to nine digits, and at least what it is there; the same with the other sign. size: at least how
    large derivatives are beside those of an activation whose slope changes over a unit.
    """

    jets: Callable[[Tensor], Jets]
    fourth: float
    peaks: tuple[tuple[float, float], ...]
    size: float = 1.0

    def bend(self, activation: maps.Activation, h: Tensor, reach: Upper) -> Bend:
        """What is beyond the second order by the third, and no more than slopes allow, `steep`."""
        value, slope, second, third = self.jets(h)
        error = self._rounding(h)
        local = sizes(third) + error + Upper(self.fourth / 4) * reach
        third_order = self.largest_third(h, reach).minimum(local)
        steep = Upper(float(steepness.one(activation))) + sizes(slope) + error
        beyond = third_order * reach.square() * reach / 6
        return Bend(value, slope, second, third_order, torch.zeros_like(h), beyond, steep, error)

    def largest_third(self, h: Tensor, reach: Upper) -> Upper:
        """At least max |φ'''| within `reach` of h: at an end, or at a peak."""
        far = reach.bound
        error = self._rounding(h) + self._rounding(far)
        found = (1 + Upper(self.fourth)) * error  # of the ends, and of φ''' there
        found = found + sizes(self.jets(h - far)[3]).maximum(sizes(self.jets(h + far)[3]))
        for place, height in self.peaks:
            about = (far + error.bound) * (1 + 4 * UNIT) + 1e-7 * (1 + place)
            inside = ((h - place).abs() <= about) | ((h + place).abs() <= about)
            found = found.maximum(Upper(torch.where(inside, height, 0.0)))
        return found

    def _rounding(self, h: Tensor) -> Upper:
        """How far derivatives at h may be off."""
        return Upper(8 * ELEMENTARY * UNIT * self.size) * (1 + sizes(h))


@bend.rule(maps.Gelu)
def _gelu(activation: maps.Gelu, h: Tensor, reach: Upper) -> Bend:
    return (TANH_GELU if activation.tanh else NORMAL_GELU).bend(activation, h, reach)


def _normal_gelu(h: Tensor) -> Jets:
    """hΦ, Φ + hp, (2 - h²)p, (h³ - 4h)p with p the normal density; φ'''' = (7h² - h⁴ - 4)p."""
    density = torch.exp(-0.5 * h * h) / math.sqrt(2 * math.pi)
    law = 0.5 * torch.special.erfc(-h / math.sqrt(2))
    return h * law, law + h * density, (2 - h * h) * density, (h**3 - 4 * h) * density


def _tanh_gelu(h: Tensor) -> Jets:
    """h(1 + T)/2, T = tanh y, y = a(h + bh³): by the chain rule."""
    a, b = math.sqrt(2 / math.pi), 0.044715
    y = a * (h + b * h**3)
    t = torch.tanh(y)
    y1, y2, y3 = a * (1 + 3 * b * h * h), 6 * a * b * h, 6 * a * b
    s = 1 / torch.cosh(y).clamp_max(1e150).square()
    t1 = s * y1
    t2 = s * y2 - 2 * t * s * y1**2
    t3 = s * y3 - 6 * t * s * y1 * y2 + (4 * t * t * s - 2 * s * s) * y1**3
    value = torch.nn.functional.gelu(h, approximate="tanh")
    return value, 0.5 * (1 + t) + 0.5 * h * t1, t1 + 0.5 * h * t2, 1.5 * t2 + 0.5 * h * t3


NORMAL_GELU = Smooth(_normal_gelu, 1.59578, ((0.7922869914, 0.778770), (2.524337799, 0.098742)))
TANH_GELU = Smooth(_tanh_gelu, 1.604, ((0.7875761864, 0.776692), (2.553417914, 0.098788)))


@bend.rule(maps.Silu)
def _silu(activation: maps.Silu, h: Tensor, reach: Upper) -> Bend:
    """hσ(ch), whose third derivative is c² times that of hσ(h) at ch."""
    c = activation.slope
    peaks = ((1.031958242, 0.308182), (4.429235101, 0.013863))
    scaled = tuple((place / max(abs(c), 1e-200), height * c * c) for place, height in peaks)
    size = max(1.0, abs(c)) ** 3  # the third derivative grows like c², and the rounding of ch like c
    return Smooth(partial(_silu_jets, c), 0.50001 * abs(c) ** 3, scaled, size).bend(activation, h, reach)


def _silu_jets(c: float, h: Tensor) -> Jets:
    """σ' = σ(1-σ), and so on."""
    s = torch.sigmoid(c * h)
    s1 = s * torch.sigmoid(-c * h)
    s2, s3 = s1 * (1 - 2 * s), s1 * (1 - 6 * s1)
    return h * s, s + c * h * s1, 2 * c * s1 + c * c * h * s2, 3 * c * c * s2 + c**3 * h * s3


@bend.rule(maps.Tanh)
def _tanh(activation: maps.Tanh, h: Tensor, reach: Upper) -> Bend:
    return TANH.bend(activation, h, reach)


def _tanh_jets(h: Tensor) -> Jets:
    """T, 1 - T², -2T(1 - T²), (6T² - 2)(1 - T²)."""
    t = torch.tanh(h)
    s = 1 / torch.cosh(h).clamp_max(1e150).square()
    return t, s, -2 * t * s, (6 * t * t - 2) * s


TANH = Smooth(_tanh_jets, 4.0859, ((0.0, 2.000001), (1.146215835, 0.666667)))


@bend.rule(maps.Relu)
def _relu(activation: maps.Relu, h: Tensor, reach: Upper) -> Bend:
    """The chord where the sign may change: on [l, u] with l < 0 < u, max(x, 0) lies between λx and λ(x - l),
    λ = u/(u - l). Any λ of [0, 1] is sound with the larger of (1-λ)u and -λl.
    """
    far = reach.bound
    low, high = h - far * (1 + 4 * UNIT), h + far * (1 + 4 * UNIT)
    low, high = low - 4 * UNIT * h.abs(), high + 4 * UNIT * h.abs()
    crossing = (low < 0) & (high > 0)
    slope = torch.where(crossing, high / (high - low), (h > 0).double()).clamp(0.0, 1.0)
    most = torch.maximum((1 - slope) * high, -slope * low) * (1 + 8 * UNIT)
    middle = torch.where(crossing, 0.5 * most, 0.0)
    value = torch.where(crossing, slope * h, h.clamp_min(0.0))
    error = Upper(8 * UNIT) * (sizes(h) + reach)
    zero = torch.zeros_like(h)
    return Bend(
        value, slope, zero, exact(zero), middle, Upper(middle), Upper(torch.full_like(h, math.inf)), error
    )
