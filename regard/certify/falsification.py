"""falsify: an attack on every certificate. What it finds is a lower bound that can be checked by hand: points, and how far their values are apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._verb import Verb
from regard.certify.certification import deviation_domain
from regard.certify.setting import moves_of
from regard.domains import Ball, Domain, Near, Neighborhood, Radii, Shell, TokenSet, Whole
from regard.errors import ArgumentError
from regard.maps import Map
from regard.attention import Attention
from regard.measure import Measure
from regard.norms import EntryMax, Frobenius, Norm, TokenMax, TokenSum, Wasserstein

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Witness:
    """Two points of the domain whose values are `value` times as far apart as they are (or just `value` apart, for a deviation)."""

    value: float
    point: Tensor
    other: Tensor
    norm: Norm

    def __str__(self) -> str:
        return f"≥ {self.value:.6g} in {self.norm!r}, seen at a pair of points {list(self.point.shape)}"

    __repr__ = __str__


def falsify(
    map: Any, domain: Domain, norm: Norm, *, steps: int = 40, restarts: int = 8, tokens: int = 6, width: int | None = None,
    generator: torch.Generator | None = None,
) -> Witness:  # fmt: skip
    """Gradient ascent on how much the map stretches, from several starts; never above a valid certificate.

    tokens, width: the size of sequences where the domain leaves it open.
    """
    attack = _Attack(map, domain, norm, generator, tokens, width)
    best = max((attack.climb(start, steps) for start in range(restarts)), key=lambda witness: witness.value)
    return best


def falsify_deviation(
    map: Any, domain: Near, norm: Norm, *, steps: int = 60, restarts: int = 4, generator: torch.Generator | None = None
) -> Witness:
    """Gradient ascent on how far the value moves over a neighborhood; never above a valid deviation."""
    deviation_domain(domain)
    attack = _Attack(map, domain, norm, generator, 1, None)
    return max((attack.move(start, steps) for start in range(restarts)), key=lambda witness: witness.value)


class _Attack:
    def __init__(self, map: Any, domain: Domain, norm: Norm, generator: torch.Generator | None, tokens: int, width: int | None) -> None:
        self.domain, self.norm = domain, norm
        self.generator = torch.Generator().manual_seed(0) if generator is None else generator
        self._sequence_norm = _matched(norm)
        measure = domain.measure if isinstance(domain, Near) else None
        self.function = _function(map, measure)
        if isinstance(domain, Near):
            self.tokens, self.width = domain.measure.points.shape
        else:
            assert isinstance(domain, TokenSet)
            center = domain.center if isinstance(domain, Ball) else None
            self.tokens = domain.tokens or tokens
            found = len(center) if center is not None else width or _width_of(map)
            if found is None:
                raise ArgumentError("width", "is not given", "say how wide a token is: the domain and the map leave it open")
            self.width = found

    def climb(self, start: int, steps: int) -> Witness:
        """Alternate: the worst direction at a point, then the point uphill for that direction."""
        x = self._start(start)
        direction = self._unit(self._random(x))
        best, best_x, best_direction = -1.0, x, direction
        rate, size = 0.3, self._size()
        for _ in range(steps):
            direction, value = self._worst(x, direction)
            if value > best:
                best, best_x, best_direction, rate = value, x, direction, min(1.0, rate * 1.3)
            else:
                x, direction, rate = best_x, best_direction, rate * 0.5
            if rate < 1e-4:
                break
            uphill = self._gradient(x, direction)
            length = self._sequence_norm.of(uphill) if isinstance(self._sequence_norm, Frobenius) else uphill.norm()
            if not float(length) > 0:
                break
            x = self._into(x + rate * size * math.sqrt(self.tokens) * uphill / length)
        return self._pair(best_x, best_direction)

    def move(self, start: int, steps: int) -> Witness:
        """Uphill on |f(x') - f(x)| from inside the neighborhood."""
        assert isinstance(self.domain, Near)
        center = self.domain.measure.points
        value = self.function(center)
        x = self._into(center + self._spread() * self._unit(self._random(center)) * (1.0 if start else 0.1))
        best, best_x, rate = -1.0, x, 1.0
        for _ in range(steps):
            leaf = x.detach().requires_grad_()
            far = self._sequence_norm.of(self.function(leaf) - value)
            if float(far) > best:
                best, best_x = float(far), x
            else:
                rate *= 0.7
            (uphill,) = torch.autograd.grad(far, leaf)
            x = self._into(x + rate * self._spread() * self._unit(uphill) if bool((uphill != 0).any()) else x)
            if rate < 1e-4:
                break
        return Witness(best, best_x, center, self.norm)

    def _worst(self, x: Tensor, direction: Tensor) -> tuple[Tensor, float]:
        """Power steps between a norm and its dual."""
        value, pull = torch.func.vjp(self.function, x)
        found = 0.0
        for _ in range(6):
            moved = torch.func.jvp(self.function, (x,), (direction,))[1]
            length = float(self._sequence_norm.of(moved))
            if length <= found * (1 + 1e-9):
                break
            found = length
            (z,) = pull(_dual(self._sequence_norm, moved))
            direction = self._allowed_unit(z)
        moved = torch.func.jvp(self.function, (x,), (direction,))[1]
        return direction, float(self._sequence_norm.of(moved))

    def _gradient(self, x: Tensor, direction: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        moved = torch.func.jvp(self.function, (leaf,), (direction,))[1]
        (found,) = torch.autograd.grad(self._sequence_norm.of(moved), leaf)
        return found.detach()

    def _pair(self, x: Tensor, direction: Tensor) -> Witness:
        """A pair of points inside the domain: what a derivative says, seen by a difference."""
        size = self._size()
        best = Witness(0.0, x, x, self.norm)
        for step in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5):
            for sign in (1.0, -1.0):
                other = self._into(x + sign * step * size * direction)
                apart = self._distance(x, other)
                if apart > 1e-9 * size:
                    ratio = self._distance(self.function(x), self.function(other)) / apart
                    best = max(best, Witness(ratio, x, other, self.norm), key=lambda witness: witness.value)
        return best

    def _distance(self, a: Tensor, b: Tensor) -> float:
        if isinstance(self.norm, Wasserstein):
            from regard.transport import wasserstein

            return float(wasserstein(Measure(a), Measure(b), self.norm.p))
        return float(self._sequence_norm.of(a - b))

    # Where points may be

    def _size(self) -> float:
        if isinstance(self.domain, Near):
            return max(float(moves_of(self.domain).max()), 1e-3)
        if isinstance(self.domain, Ball):
            return max(float(self.domain.radius), 1e-12)
        if isinstance(self.domain, Shell):
            return max(self.domain.inner, min(self.domain.outer, 1.0)) * math.sqrt(self.width)
        return 1.0

    def _spread(self) -> float:
        assert isinstance(self.domain, Near)
        return float(moves_of(self.domain).max())

    def _random(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=torch.float64)

    def _start(self, start: int) -> Tensor:
        shape = (self.tokens, self.width)
        if isinstance(self.domain, Near):
            center = self.domain.measure.points
            return center if start == 0 else self._into(center + self._spread() * self._unit(self._random(center)))
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if start % 3 == 1:  # a hub and the rest on the other side
            x[1:] = -x[:1] + 0.1 * x[1:]
        if start % 3 == 2:  # few clusters
            x = x[torch.randint(0, max(1, min(3, self.tokens)), (self.tokens,), generator=self.generator)] + 0.05 * x
        scale = torch.rand((), generator=self.generator, dtype=torch.float64)
        if isinstance(self.domain, Whole):
            return x * 10 ** (2 * scale - 0.5)
        x = x / x.norm(dim=-1, keepdim=True)
        center = self.domain.center if isinstance(self.domain, Ball) else None
        x = x * self._size() * (scale if start % 2 else 1.0)
        return self._into(x if center is None else x + center.double())

    def _into(self, x: Tensor) -> Tensor:
        return project.one(self.domain, x)

    def _unit(self, z: Tensor) -> Tensor:
        return _primal(self._sequence_norm, z)

    def _allowed_unit(self, z: Tensor) -> Tensor:
        if isinstance(self.domain, Radii):  # a token that may not move has no direction
            z = z * (self.domain.radii > 0).to(z.dtype).unsqueeze(-1)
        return _primal(self._sequence_norm, z) if bool((z != 0).any()) else z


def _function(map: Any, measure: Measure | None) -> Function:
    """The map on bare points; weights and marks of the domain's measure are held fixed."""
    if isinstance(map, Attention) and measure is not None and (measure.log_weights is not None or measure.marks is not None):
        def attention(x: Tensor) -> Tensor:
            found = map(measure.replace(points=x))
            return found.points if isinstance(found, Measure) else found

        return _joined(attention)
    return _joined(map)


def _joined(function: Function) -> Function:
    """Heads side by side are one wide token."""

    def joined(x: Tensor) -> Tensor:
        value = function(x)
        return value if value.ndim == 2 else value.reshape(-1, *value.shape[-2:]).transpose(0, 1).flatten(1)

    return joined


def _width_of(map: Any) -> int | None:
    from regard.certify.subject import _width

    if isinstance(map, Attention):
        return _width(map)
    if isinstance(map, Map) and isinstance(getattr(map, "attention", None), Attention):
        return _width(map.attention)  # type: ignore[attr-defined]
    return None


def _matched(norm: Norm) -> Any:
    """The norm of matched sequences that a Wasserstein distance is for small moves."""
    if isinstance(norm, Wasserstein):
        return TokenMax() if math.isinf(norm.p) else Frobenius() if norm.p == 2 else TokenSum()
    return norm


def _primal(norm: Norm, z: Tensor) -> Tensor:
    """The unit vector that has the largest product with z."""
    lengths = z.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    if isinstance(norm, TokenMax):
        return z / lengths
    if isinstance(norm, TokenSum):
        out = torch.zeros_like(z)
        best = int(lengths.argmax())
        out[best] = z[best] / lengths[best]
        return out
    if isinstance(norm, EntryMax):
        return torch.where(z >= 0, 1.0, -1.0).to(z.dtype)
    return z / z.norm().clamp_min(1e-300)


def _dual(norm: Norm, y: Tensor) -> Tensor:
    """The functional of dual norm one whose value at y is its norm."""
    lengths = y.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    if isinstance(norm, TokenSum):
        return y / lengths
    out = torch.zeros_like(y)
    if isinstance(norm, TokenMax):
        best = int(lengths.argmax())
        out[best] = y[best] / lengths[best]
        return out
    if isinstance(norm, EntryMax):
        best = int(y.abs().argmax())
        out.view(-1)[best] = y.reshape(-1)[best].sign()
        return out
    return y / y.norm().clamp_min(1e-300)


project = Verb("project")
"""project.one(domain, x): a point of the domain near x."""


@project.rule(Whole)
def _anywhere(domain: Whole, x: Tensor) -> Tensor:
    return x


@project.rule(Ball)
def _ball(domain: Ball, x: Tensor) -> Tensor:
    center = torch.zeros(x.shape[-1], dtype=x.dtype) if domain.center is None else domain.center.to(x.dtype)
    away = x - center
    length = away.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return center + away * (domain.radius * (1 - 1e-12) / length).clamp(max=1.0)


@project.rule(Shell)
def _shell(domain: Shell, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    away = x - mean
    size = away.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-300)
    return mean + away * (size.clamp(domain.inner * (1 + 1e-12), domain.outer) / size)


@project.rule(Neighborhood)
def _near(domain: Neighborhood, x: Tensor) -> Tensor:
    center = domain.measure.points
    away = x - center
    length = away.norm() if isinstance(domain.norm, Frobenius) else away.norm(dim=-1, keepdim=True)
    return center + away * (domain.radius * (1 - 1e-12) / length.clamp_min(1e-300)).clamp(max=1.0)


@project.rule(Radii)
def _radii(domain: Radii, x: Tensor) -> Tensor:
    center = domain.measure.points
    away = x - center
    length = away.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return center + away * (domain.radii.double().unsqueeze(-1) * (1 - 1e-12) / length).clamp(max=1.0)
