"""A case: a declaration with a domain and a norm, its value by the definition, and points of its domain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard as r
from benchmarks.drawing import Draw
from regard.attention import log_counts
from regard.domains import Ball, Domain, Near, Neighborhood, Radii, Shell, Whole
from regard.maps import Added, Compose, FromQueries, Heads, Joint, Residual, ToContext
from regard.measure import Measure
from regard.normalizers import Reference
from regard.norms import Norm, TokenMax
from regard.tilt import Tilt


@dataclass(frozen=True)
class Case:
    """What a seed stands for in a family.

    `other` is the size of a second law, where laws with different numbers of atoms are compared.
    """

    seed: int
    map: Any
    domain: Domain
    norm: Norm
    tokens: int
    width: int
    family: str = "self"
    other: int | None = None

    def __str__(self) -> str:
        sizes = f"{self.tokens} tokens of width {self.width}"
        return (
            f"--family {self.family} --case {self.seed}: {_kind(self.map)}, {_where(self.domain)}, "
            f"{self.norm!r}, {sizes}"
        )

    @property
    def measure(self) -> Measure | None:
        """The sequence whose weights and marks stay, where there is one."""
        return self.domain.measure if isinstance(self.domain, Near) else None

    @property
    def bare(self) -> bool:
        """Whether there are neither weights nor marks."""
        return self.measure is None or (self.measure.log_weights is None and self.measure.marks is None)

    def function(self, x: Tensor) -> Tensor:
        """The value at bare points, by the definition; heads side by side."""
        value = _value(self.map, x, self.measure)
        return value if value.ndim == 2 else value.transpose(0, 1).flatten(1)

    def law(self, measure: Measure) -> Measure:
        """The law of the values of a law."""
        if isinstance(self.map, Tilt):
            return self.map(measure)
        return Measure(_value(self.map, measure.points, measure), measure.log_weights)


# Values by the definition, which share nothing with the engines


def _value(map: Any, x: Tensor, measure: Measure | None) -> Tensor:
    if isinstance(map, (r.Attention, Heads, ToContext, FromQueries, Joint)):
        return _attention(map, Measure(x) if measure is None else measure.replace(points=x))
    if isinstance(map, Residual):
        return x + _value(map.map, x, measure)
    if isinstance(map, Added):
        return torch.stack([_value(inner, x, measure) for inner in map.maps]).sum(0)
    if isinstance(map, Compose):
        for inner in map.maps:
            x = _value(inner, x, measure)
        return x
    return _module(map, x) if isinstance(map, nn.Module) else map(x)


def _module(module: nn.Module, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # other kernels have no rule under vmap
        found = module(x, x, x)[0] if isinstance(module, nn.MultiheadAttention) else module(x)
    assert isinstance(found, Tensor)
    return found


def _attention(map: Any, x: Measure) -> Tensor:
    if isinstance(map, Heads):
        mixed = (_defined(map.attention, x, x) @ map.w_o).sum(-3)
        return mixed if map.b_o is None else mixed + map.b_o
    if isinstance(map, ToContext):
        return _defined(
            map.attention, x, map.context if isinstance(map.context, Measure) else Measure(map.context)
        )
    if isinstance(map, FromQueries):
        return _defined(map.attention, Measure(map.queries), x)
    if isinstance(map, Joint):
        return _defined(map.attention, Measure(x.points[: map.queries]), Measure(x.points[map.queries :]))
    return _defined(map, x, x)


def _defined(attention: r.Attention, x: Measure, y: Measure) -> Tensor:
    """Weights times values."""
    reference = Reference(log_counts(y), attention.support.allows(x.positions(), y.positions()))
    weights = attention.normalizer.weights(
        attention.potential.scores(x.points, y.points, x.positions(), y.positions()), reference
    )
    values = attention.lookup.values(y.points, y.positions())
    if weights.ndim == values.ndim == 3 and len(weights) > len(values):
        values = values.repeat_interleave(len(weights) // len(values), 0)
    return weights @ values


def _kind(map: Any) -> str:
    if isinstance(map, r.Attention):
        parts = (map.potential, map.lookup, map.normalizer, map.support)
        return " ".join(type(part).__name__ for part in parts)
    inner = [getattr(map, name) for name in ("map", "attention") if hasattr(map, name)] or list(
        getattr(map, "maps", ())
    )
    return f"{type(map).__name__}({', '.join(_kind(part) for part in inner)})"


def _where(domain: Any) -> str:
    if isinstance(domain, (Whole, Shell)):
        return repr(domain)
    size = f"{float(domain.radii.max()):.2g}" if isinstance(domain, Radii) else f"{domain.radius:.2g}"
    return f"{type(domain).__name__} {size}"


# Points of domains


def inside(draw: Draw, case: Case, tokens: int | None = None) -> Tensor:
    """A point of the domain, often on its boundary."""
    n, d, domain = tokens or case.tokens, case.width, case.domain
    length = 1 - 1e-12 if draw.chance(0.6) else draw.share()
    if isinstance(domain, Ball):
        return _in_ball(draw, n, d, length * domain.radius) + (
            0.0 if domain.center is None else domain.center
        )
    if isinstance(domain, Near):
        return _near(draw, domain, length)
    if isinstance(domain, Shell):
        return _in_shell(draw, domain, n, d)
    return _in_ball(draw, n, d, draw.size(0.01, 100.0)) + draw.pick([0.0, 1.0]) * draw.normal(d)


def _in_ball(draw: Draw, n: int, d: int, radius: float) -> Tensor:
    x = draw.units(n, d)
    if draw.chance(0.5):  # a hub, and the rest close together elsewhere
        x = torch.where(
            torch.arange(n).unsqueeze(-1) < draw.count(1, n), x[:1] + 0.1 * x, draw.pick([-1.0, 1.0]) * x[-1:]
        )
        x = x / x.norm(dim=-1, keepdim=True).clamp_min(1.0)
    return x * radius


def _near(draw: Draw, domain: Near, length: float) -> Tensor:
    n, d = domain.measure.points.shape
    step = draw.units(n, d) * (torch.rand(n, 1, generator=draw.generator) > draw.pick([0.0, 0.5])).to(
        torch.float64
    )
    if isinstance(domain, Radii):
        return domain.measure.points + length * step * domain.radii.unsqueeze(-1)
    assert isinstance(domain, Neighborhood)
    step = step if isinstance(domain.norm, TokenMax) else step * draw.normal(n, 1)
    step = step if isinstance(domain.norm, TokenMax) else step / step.norm().clamp_min(1e-300)
    return domain.measure.points + length * domain.radius * step


def _in_shell(draw: Draw, domain: Shell, n: int, d: int) -> Tensor:
    """Tokens whose deviation is often the least one; the mean is free where it is taken off."""
    x = draw.normal(n, d)
    x = x - x.mean(-1, keepdim=True) if domain.centered else x
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    most = domain.outer if math.isfinite(domain.outer) else 3 * domain.inner + 1
    share = torch.rand(n, 1, generator=draw.generator, dtype=torch.float64) * (
        torch.rand(n, 1, generator=draw.generator) > 0.6
    )
    x = x * (domain.inner * (1 + 1e-12) + share * max(0.0, most * (1 - 1e-12) - domain.inner * (1 + 1e-12)))
    return x + draw.size(0.1, 10.0) * draw.normal(n, 1) if domain.centered else x


def other_law(draw: Draw, case: Case, x: Tensor) -> Tensor:
    """Another number of tokens of a ball: anywhere, or copies of some tokens that were moved a little."""
    assert case.other is not None
    assert isinstance(case.domain, Ball)
    y = inside(draw, case, case.other)
    if draw.chance(0.6):
        y = x[torch.randint(0, len(x), (case.other,), generator=draw.generator)]
        y = y + draw.size(1e-4, 1.0) * case.domain.radius * draw.units(*y.shape)
    center = (
        torch.zeros(case.width, dtype=torch.float64) if case.domain.center is None else case.domain.center
    )
    away = y - center
    return center + away * (
        case.domain.radius * (1 - 1e-12) / away.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    ).clamp(max=1.0)
