"""falsify: an attack on every certificate.

It finds points, and how far their values are apart: a lower bound that anyone can check.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._kinds import names_wrong_kinds
from regard.attention import Attention
from regard.compute import ReferenceEngine, apply
from regard.domains import Ball, Box, Domain, Hull, Near, Neighborhood, Radii, Shell, TokenSet, Whole
from regard.errors import ArgumentError
from regard.maps import Heads
from regard.measure import Measure
from regard.norms import EntryMax, Frobenius, Norm, OwnToken, SequenceNorm, TokenMax, TokenSum, Wasserstein
from regard.proofs.certification import declare, deviation_domain
from regard.proofs.mass_attack import MassAttack, weighted_values
from regard.proofs.places import farthest, project, unit, units
from regard.proofs.setting import moves_of
from regard.proofs.shapes import widths

Function = Callable[[Tensor], Tensor]
LOOKS = 4
"""Points that are looked at before a climb, and directions after it: a climb ends at the nearest top."""
POWERS = 40
"""Power steps at the end of a climb; six on the way, where the next point has its own direction."""


@dataclass(frozen=True)
class Witness:
    """Two points of the domain whose values are `value` times as far apart as they are (or just `value`
    apart, for a deviation); two laws, as Measures, where masses were moved.

    Examples:
        >>> x = torch.randn(3, 2, dtype=torch.float64)
        >>> layer, typo = regard.Attention(regard.Dot()), regard.one_token(x, 0, 0.1)
        >>> found = regard.falsify_deviation(layer, typo, regard.Frobenius(), restarts=1, steps=9)
        >>> found.point.shape == found.other.shape == x.shape
        True
    """

    value: float
    point: Tensor | Measure
    other: Tensor | Measure
    norm: Norm

    def __str__(self) -> str:
        law = isinstance(self.point, Measure)
        what = f"laws of {self.point.size} atoms" if law else f"points {list(self.point.shape)}"  # type: ignore[union-attr]
        return f"≥ {self.value:.6g} in {self.norm!r}, seen at a pair of {what}"

    __repr__ = __str__


@names_wrong_kinds
def falsify(
    map: Any,
    domain: Domain,
    norm: Norm,
    *,
    steps: int = 40,
    restarts: int = 8,
    tokens: int = 6,
    width: int | None = None,
    generator: torch.Generator | None = None,
) -> Witness:
    """Gradient ascent on how much the map stretches, from several starts; never above a valid certificate.

    tokens, width: the size of sequences where the domain leaves it open. In Wasserstein(p) with a finite p
    that is the number of atoms, whose masses climb too: the worst law is often nearly one point.

    Examples:
        >>> layer = regard.Attention(regard.Dot(torch.eye(2), torch.eye(2)))
        >>> unit = regard.Ball(1.0, tokens=3)
        >>> regard.falsify(layer, unit, regard.Frobenius(), restarts=1, steps=9).value > 0.5
        True
    """
    if isinstance(domain, Near) and not bool((moves_of(domain) > 0).any()):
        remedy = "one point has no pair of points; linearize(map, points).norm() attains the constant there"
        raise ArgumentError("domain", "has the radius 0", remedy)
    attack = _Attack(map, domain, norm, generator, tokens, width)
    found = attack.climb_with_masses(2 * restarts, 5 * steps)
    found = found or [attack.climb(start, steps) for start in range(restarts)]
    return max(found, key=lambda witness: witness.value)


@names_wrong_kinds
def falsify_deviation(
    map: Any,
    domain: Near,
    norm: Norm,
    *,
    steps: int = 60,
    restarts: int = 4,
    generator: torch.Generator | None = None,
) -> Witness:
    """Gradient ascent on how far the value moves over a neighborhood; never above a valid deviation.

    Examples:
        >>> x = torch.randn(4, 3, dtype=torch.float64)
        >>> layer, typo = regard.Attention(regard.Dot()), regard.one_token(x, 0, 0.1)
        >>> found = regard.falsify_deviation(layer, typo, regard.Frobenius(), restarts=1, steps=9)
        >>> 0 < found.value < 1
        True
    """
    deviation_domain(domain)
    if not isinstance(domain, Near):
        remedy = "write another input of the domain and compare the outputs"
        raise ArgumentError("domain", f"is {domain!r}", remedy)
    attack = _Attack(map, domain, norm, generator, 1, None)
    return max((attack.move(start, steps) for start in range(restarts)), key=lambda witness: witness.value)


class _Attack:
    def __init__(
        self,
        map: Any,
        domain: Domain,
        norm: Norm,
        generator: torch.Generator | None,
        tokens: int,
        width: int | None,
    ) -> None:
        self.domain, self.norm = domain, norm
        self.generator = torch.Generator().manual_seed(0) if generator is None else generator
        self._sequence_norm = _matched_norm(norm)
        measure = domain.measure if isinstance(domain, Near) else None
        declared = declare.one(map) if isinstance(map, torch.nn.Module) else map
        self.declared = _in_double(declared)
        self.function = self._whole = _function(declared, measure)
        self.own: int | None = None
        if (
            isinstance(norm, OwnToken)
            and isinstance(domain, Neighborhood)
            and isinstance(domain.norm, Frobenius)
        ):
            remedy = (
                "one token moves alone in Neighborhood(points, radius, TokenMax()) or Radii(points, radii)"
            )
            raise ArgumentError("domain", "is a ball in Frobenius norm, which tokens share", remedy)
        if isinstance(domain, Near):
            self.tokens, self.width = domain.measure.points.shape
        else:
            assert isinstance(domain, TokenSet)
            known = None if not isinstance(domain, Ball) or domain.center is None else len(domain.center)
            self.tokens = domain.tokens or tokens
            found = known or width or widths.one(declared, None).takes
            if found is None:
                raise ArgumentError(
                    "width", "is not given", "say how wide a token is: the domain and the map leave it open"
                )
            self.width = found
        widths.one(declared, self.width)

    def climb(self, start: int, steps: int) -> Witness:
        """Alternate: the worst direction at a point, then the point uphill for that direction."""
        if isinstance(self.norm, OwnToken):
            own = self.own = start % self.tokens
            self.function = lambda x: self._whole(x)[..., own : own + 1, :]
        looks = [self._look(self._start(start)) for _ in range(LOOKS)]
        x, direction, best = max(looks, key=lambda look: look[2])
        rate = 0.5
        for _ in range(steps):
            uphill = self._gradient(x, direction)
            goal = self._goal(x, uphill)
            while rate > 1e-3:
                other = self._into(x + rate * (goal - x))
                turned, value = self._worst(other, direction)
                if value > best * (1 + 1e-7):
                    x, direction, best, rate = other, turned, value, min(1.0, 2 * rate)
                    break
                rate *= 0.4
            if rate <= 1e-3:
                break
        again = [self._look(x, POWERS, row) for row in range(min(self.tokens, 2 * LOOKS))]
        ends = [(x, *self._worst(x, direction, POWERS)), *again]  # a direction may be best for its token only
        return self._pair(x, max(ends, key=lambda look: look[2])[1])

    def climb_with_masses(self, restarts: int, steps: int) -> list[Witness]:
        """The best pair of laws, where the domain is about laws and the map knows what weights are."""
        norm, domain = self.norm, self.domain
        if not isinstance(norm, Wasserstein) or math.isinf(norm.p):
            return []
        if not isinstance(domain, TokenSet) or domain.tokens is not None:
            return []
        values = weighted_values(self.declared)
        sizes = (self._size(), self.width, self.tokens)
        attack = MassAttack(values, domain, norm.p, *sizes, self.generator)
        try:
            value, point, other = attack.climb(restarts, steps)
        except ArgumentError:  # a map that says nothing of weights
            return []
        return [Witness(value, point, other, norm)]

    def _look(self, x: Tensor, powers: int = 6, row: int | None = None) -> tuple[Tensor, Tensor, float]:
        """A point, and the worst direction there from a random one, with how much it stretches."""
        return x, *self._worst(x, self._aim(x, row), powers)

    def _aim(self, x: Tensor, row: int | None) -> Tensor:
        """A random direction; where a norm looks at one token of the value, one that moves this token, or a
        random one: power steps stay with the token they begin with.
        """
        direction = self._allowed_unit(self._random(x))
        if not isinstance(self._sequence_norm, (TokenMax, EntryMax)):
            return direction
        value, pull = torch.func.vjp(self.function, x)[:2]
        drawn = int(torch.randint(0, len(value), (), generator=self.generator))
        aimed, at = torch.zeros_like(value), drawn if row is None else row % len(value)
        aimed[at] = self._random(value[at])
        z = self._allowed_unit(pull(aimed)[0])
        return z if bool((z != 0).any()) else direction

    def _goal(self, x: Tensor, uphill: Tensor) -> Tensor:
        """Where a full step leads: the far end of a bounded domain, or some way up."""
        if isinstance(self.domain, (Ball, Near)):
            return farthest.one(self.domain, uphill)
        return x + self._size() * units(uphill)

    def move(self, start: int, steps: int) -> Witness:
        """Uphill on |f(x') - f(x)|: to the point of the neighborhood that is farthest along the gradient,
        or a part of the way.
        """
        assert isinstance(self.domain, Near)
        center = self.domain.measure.points
        value = self.function(center)

        def far(x: Tensor) -> Tensor:
            return self._sequence_norm.of(self.function(x) - value)

        x = self._first(start, center)
        best, rate = float(far(x)), 1.0
        for _ in range(steps):
            leaf = x.detach().requires_grad_()
            (uphill,) = torch.autograd.grad(far(leaf), leaf)
            goal = farthest.one(self.domain, uphill)
            while rate > 1e-3:
                other = self._into(x + rate * (goal - x))
                height = float(far(other))
                if height > best * (1 + 1e-9):
                    best, x, rate = height, other, min(1.0, 2 * rate)
                    break
                rate *= 0.5
            if rate <= 1e-3:
                break
        moved = best if isinstance(self.norm, SequenceNorm) else self._distance(self.function(x), value)
        return Witness(max(0.0, moved - self._rounding(value)), x, center, self.norm)

    def _rounding(self, value: Tensor) -> float:
        """What rounding may add to a distance of values: a witness must not rest on it."""
        size = 8 * torch.finfo(torch.float64).eps * float(value.detach().abs().amax())
        return float(self._sequence_norm.of(torch.full_like(value, size)))

    def _first(self, start: int, center: Tensor) -> Tensor:
        """Where the linear part moves most; for TokenMax each start has a row of its own, best rows first."""
        assert isinstance(self.domain, Near)
        if not isinstance(self._sequence_norm, TokenMax):
            direction = self._allowed_unit(self._random(center))
            direction = self._worst(center, direction)[0] if start % 2 == 0 else direction
            return farthest.one(
                self.domain, torch.func.vjp(self.function, center)[1](self._push(center, direction))[0]
            )
        if not hasattr(self, "_rows"):
            self._rows = self._best_rows(center)
        return self._rows[start % len(self._rows)]

    def _push(self, x: Tensor, direction: Tensor) -> Tensor:
        return torch.func.jvp(self.function, (x,), (direction,))[1]

    def _best_rows(self, center: Tensor) -> list[Tensor]:
        assert isinstance(self.domain, Near)
        value, pull = torch.func.vjp(self.function, center)[:2]
        found = []
        for row in range(len(value)):
            u = torch.zeros_like(value)
            u[row] = torch.randn(value.shape[-1], generator=self.generator, dtype=torch.float64)
            for _ in range(4):
                x = farthest.one(self.domain, pull(u)[0])
                moved = self._push(center, x - center)[row]
                u[row] = unit(moved)
            found.append((float(moved.norm()), x))
        return [x for _, x in sorted(found, key=lambda pair: -pair[0])]

    def _worst(self, x: Tensor, direction: Tensor, powers: int = 6) -> tuple[Tensor, float]:
        """Power steps between a norm and its dual."""
        pull = torch.func.vjp(self.function, x)[1]
        found = 0.0
        for _ in range(powers):
            moved = self._push(x, direction)
            length = float(self._sequence_norm.of(moved))
            if length <= found * (1 + 1e-9):
                break
            found = length
            (z,) = pull(_dual(self._sequence_norm, moved))
            direction = self._allowed_unit(z)
        return direction, float(self._sequence_norm.of(self._push(x, direction)))

    def _gradient(self, x: Tensor, direction: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        moved = torch.func.jvp(self.function, (leaf,), (direction,))[1]
        if not moved.requires_grad:  # a linear map stretches everywhere alike
            return torch.zeros_like(x)
        (found,) = torch.autograd.grad(self._sequence_norm.of(moved), leaf)
        return found.detach()

    def _pair(self, x: Tensor, direction: Tensor) -> Witness:
        """A pair of points inside the domain: what a derivative says, seen by a difference."""
        size = self._size()
        best = Witness(0.0, x, x, self.norm)
        for step in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5):
            for point, sign in itertools.product((x, self._inward(x, 2 * step)), (1.0, -1.0)):
                other = self._into(point + sign * step * size * direction)
                apart = self._distance(point, other)
                if apart > 1e-9 * size:
                    value = self.function(point)
                    ratio = (self._distance(value, self.function(other)) - self._rounding(value)) / apart
                    found = Witness(ratio, point, other, self.norm)
                    best = max(best, found, key=lambda witness: witness.value)
        return best

    def _inward(self, x: Tensor, part: float) -> Tensor:
        """Part of the way to the center, where a step to any side stays inside:
        from the boundary, the way back into the domain would turn it.
        """
        if isinstance(self.domain, Near):
            return x + part * (self.domain.measure.points - x)
        if isinstance(self.domain, Ball):
            return (
                (1 - part) * x if self.domain.center is None else x + part * (self.domain.center.double() - x)
            )
        return x

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
            return self._near(start, self.domain.measure.points)
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if start % 3 == 1:  # a hub and the rest on the other side
            x[1:] = -x[:1] + 0.1 * x[1:]
        if start % 3 == 2:  # few clusters
            x = (
                x[torch.randint(0, max(1, min(3, self.tokens)), (self.tokens,), generator=self.generator)]
                + 0.05 * x
            )
        scale = torch.rand((), generator=self.generator, dtype=torch.float64)
        if isinstance(self.domain, Whole):
            return x * 10 ** (2 * scale - 0.5)
        x = x / x.norm(dim=-1, keepdim=True)
        middle = self.domain.center if isinstance(self.domain, Ball) else None
        x = x * self._size() * (scale if start % 2 else 1.0)
        return self._into(x if middle is None else x + middle.double())

    def _near(self, start: int, center: Tensor) -> Tensor:
        """The center, the boundary in a random direction, where tokens grow or shrink together,
        and where they run into one of them.
        """
        if start == 0:
            return center
        toward = self._random(center)
        if start % 4 == 2:
            toward = center
        if start % 4 == 3:
            toward = center[int(torch.randint(0, len(center), (), generator=self.generator))] - center
        if start % 8 >= 4:
            toward = -toward
        return self._into(center + self._spread() * self._allowed_unit(toward))

    def _into(self, x: Tensor) -> Tensor:
        return project.one(self.domain, x)

    def _unit(self, z: Tensor) -> Tensor:
        return _primal(self._sequence_norm, z)

    def _allowed_unit(self, z: Tensor) -> Tensor:
        if isinstance(self.domain, (Radii, Box, Hull)):  # a token that may not move has no direction
            z = z * (moves_of(self.domain) > 0).to(z.dtype).unsqueeze(-1)
        if self.own is not None:  # nor has one that is not the own
            z = z * (torch.arange(len(z)) == self.own).to(z.dtype).unsqueeze(-1)
        return _primal(self._sequence_norm, z) if bool((z != 0).any()) else z


def _function(map: Any, measure: Measure | None) -> Function:
    """The map on bare points; weights and marks of the domain's measure are held fixed."""
    if isinstance(map, Attention):
        return _join_heads(_plain(map, measure))
    if isinstance(map, Heads):
        inner = _plain(map.attention, measure)
        bias = 0.0 if map.b_o is None else map.b_o.double()
        return lambda x: (inner(x) @ map.w_o.double()).sum(-3) + bias
    if measure is not None and (measure.log_weights is not None or measure.marks is not None):
        raise ArgumentError(
            "domain",
            "has weights or marks",
            "an attack with them is for an Attention or Heads; give bare points",
        )
    return _join_heads(map)


def _plain(attention: Attention, measure: Measure | None) -> Function:
    """Attention by its definition, which is fastest for short sequences; weights and marks are held fixed."""
    attention = _in_double(attention)

    def run(x: Tensor) -> Tensor:
        source = x if measure is None else measure.replace(points=x)
        short = attention.normalizer.rowwise and x.shape[-2] <= 256
        found = apply(attention, source, engine=ReferenceEngine() if short else None)
        return found.points if isinstance(found, Measure) else found

    return run


def _in_double(map: Any) -> Any:
    return pytree.tree_map(
        lambda t: t.double() if isinstance(t, Tensor) and t.dtype.is_floating_point else t, map
    )


def _join_heads(function: Function) -> Function:
    """Heads side by side are one wide token."""

    def join(x: Tensor) -> Tensor:
        value = function(x)
        return value if value.ndim == 2 else value.reshape(-1, *value.shape[-2:]).transpose(0, 1).flatten(1)

    return join


def _matched_norm(norm: Norm) -> Any:
    """The norm of matched sequences that a Wasserstein distance is for small moves."""
    if isinstance(norm, Wasserstein):
        return TokenMax() if math.isinf(norm.p) else Frobenius() if norm.p == 2 else TokenSum()
    return TokenMax() if isinstance(norm, OwnToken) else norm


def _primal(norm: Norm, z: Tensor) -> Tensor:
    """The unit vector that has the largest product with z."""
    if isinstance(norm, TokenMax):
        return units(z)
    if isinstance(norm, TokenSum):
        return _longest(z)
    if isinstance(norm, EntryMax):
        return torch.where(z >= 0, 1.0, -1.0).to(z.dtype)
    return unit(z)


def _dual(norm: Norm, y: Tensor) -> Tensor:
    """The functional of dual norm one whose value at y is its norm."""
    if isinstance(norm, TokenSum):
        return units(y)
    if isinstance(norm, TokenMax):
        return _longest(y)
    if isinstance(norm, EntryMax):
        out = torch.zeros(y.shape, dtype=y.dtype)
        best = int(y.abs().argmax())
        out.view(-1)[best] = y.reshape(-1)[best].sign()
        return out
    return unit(y)


def _longest(z: Tensor) -> Tensor:
    """The longest token as a unit vector, and zeros."""
    out = torch.zeros(z.shape, dtype=z.dtype)
    best = int(z.norm(dim=-1).argmax())
    out[best] = unit(z[best])
    return out
