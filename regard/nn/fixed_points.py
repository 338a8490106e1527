"""Fixed points of contractions: iterations with a stop rule that is proved, plain or accelerated."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._object import Object
from regard.errors import ArgumentError
from regard.norms import SequenceNorm

Function = Callable[[Tensor], Tensor]


class Acceleration(Object):
    """How the next point of an iteration is chosen. Abstract."""

    @abstractmethod
    def begin(self) -> Chooser:
        """A chooser without a past."""


class Chooser:
    """The next point of an iteration of z ← g(z), from the points before it. Abstract."""

    def next(self, z: Tensor, value: Tensor) -> Tensor:
        """The point to look at after z, where g has this value."""
        raise NotImplementedError


class _Plain(Chooser):
    def next(self, z: Tensor, value: Tensor) -> Tensor:
        return value


@dataclass(frozen=True, eq=False, repr=False)
class Picard(Acceleration):
    """z ← g(z), which Banach's theorem is about.

    Examples:
        >>> from regard.maps import Affine
        >>> deep = regard.nn.Deep(Affine(0.5 * torch.eye(1)), 1e-4, regard.nn.Picard())
        >>> torch.allclose(deep(torch.ones(1, 1)), torch.full((1, 1), 2.0), atol=1e-4)
        True
    """

    def begin(self) -> Chooser:
        return _Plain()


@dataclass(frozen=True, eq=False, repr=False)
class Anderson(Acceleration):
    """z ← the combination of the last `memory` values whose residuals g(z) - z combine to the least square.

    What it proposes is kept only where the residual went down, otherwise the plain step is taken: it never
    needs more than twice the evaluations of Picard.

    Examples:
        >>> from regard.maps import Affine
        >>> from regard.nn import Anderson, Deep, Picard
        >>> f = Affine(torch.tensor([[0.9, 0.0], [0.0, -0.9]], dtype=torch.float64))
        >>> u = torch.randn(3, 2, dtype=torch.float64)
        >>> fast, plain = (Deep(f, accelerate=one).solve(u).evaluations for one in (Anderson(), Picard()))
        >>> fast < plain
        True
    """

    memory: int = 5

    def __post_init__(self) -> None:
        if not isinstance(self.memory, int) or isinstance(self.memory, bool) or self.memory < 1:
            raise ArgumentError("memory", f"is {self.memory!r}", "give a whole number of at least 1")

    def begin(self) -> Chooser:
        return _Mixing(self.memory)


class _Mixing(Chooser):
    """Anderson's combination, for each sequence of a batch."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.values: list[Tensor] = []
        self.residuals: list[Tensor] = []

    def next(self, z: Tensor, value: Tensor) -> Tensor:
        self.values = [*self.values, value.flatten(-2)][-self.memory - 1 :]
        self.residuals = [*self.residuals, (value - z).flatten(-2)][-self.memory - 1 :]
        if len(self.values) == 1:
            return value
        values, residuals = (torch.stack(part, -1).diff(dim=-1) for part in (self.values, self.residuals))
        q, r = torch.linalg.qr(residuals)
        small = torch.finfo(z.dtype).eps * 16
        shares = torch.linalg.pinv(r, rtol=small) @ (q.mT @ self.residuals[-1].unsqueeze(-1))
        mixed = self.values[-1] - (values @ shares).squeeze(-1)
        return torch.where(torch.isfinite(mixed), mixed, self.values[-1]).unflatten(-1, z.shape[-2:])


@dataclass(frozen=True)
class Solution:
    """A point that is at most `error` away from the fixed point, in the norm of the contraction.

    value: (..., n, d). error: one for each sequence. evaluations: how often the map was taken.

    Examples:
        >>> from regard.maps import Affine
        >>> deep = regard.nn.Deep(Affine(0.5 * torch.eye(1, dtype=torch.float64)), tolerance=1e-6)
        >>> found = deep.solve(torch.ones(1, 1, dtype=torch.float64))
        >>> bool(found.error <= 1e-6), bool((found.value - 2).abs().max() <= 1e-6)
        (True, True)
    """

    value: Tensor
    error: Tensor
    evaluations: int


def evaluations_needed(constant: float, first: float, tolerance: float) -> int:
    """How many steps are enough, before the first is taken: the smallest k ≥ 1 with L^k/(1 - L) · first ≤
    tolerance.
    """
    if first == 0 or constant == 0:
        return 1
    return max(1, math.ceil(math.log(tolerance * (1 - constant) / first) / math.log(constant)))


def solve(
    g: Function,
    start: Tensor,
    *,
    constant: float,
    norm: SequenceNorm,
    tolerance: float,
    acceleration: Acceleration,
    inside: Function = lambda z: z,
) -> Solution:
    """The fixed point of g, whose constant L is below one in this norm: |g(z) - z*| ≤ L/(1 - L) |g(z) - z|.

    inside: takes points that an acceleration proposes to where g is a contraction.
    """
    check_tolerance(tolerance)
    chooser, factor = acceleration.begin(), constant / (1 - constant)
    z = start
    value = g(z)
    residual = norm.of(value - z)
    if not bool(torch.isfinite(residual).all()):
        raise ArgumentError("f", "gives NaN or infinity", "a fixed point needs finite numbers")
    rounding = rounding_error(norm, constant, start, value)
    if tolerance < 2 * rounding:
        raise below_rounding(tolerance, 2 * rounding, start.dtype)
    aim = tolerance - rounding
    limit = 2 * evaluations_needed(constant, float(residual.max()), aim) + 16
    best, best_residual, count = value, residual, 1
    while not bool((factor * best_residual <= aim).all()):
        if count >= limit:  # Banach's theorem promised more: what is left is rounding
            raise below_rounding(tolerance, 4 * factor * float(best_residual.max()), start.dtype)
        worse = (residual > best_residual)[..., None, None]
        z = torch.where(worse, best, inside(chooser.next(z, value)))
        value = g(z)
        residual = norm.of(value - z)
        count += 1
        better = residual <= best_residual
        best = torch.where(better[..., None, None], value, best)
        best_residual = torch.where(better, residual, best_residual)
    return Solution(best, factor * best_residual + rounding, count)


def rounding_error(norm: SequenceNorm, constant: float, *points: Tensor) -> float:
    """What rounding may add to an error: four units in the last place of the points, over 1 - L.

    That evaluations are this exact is assumed, not proved; it is so for sequences that are not huge.
    """
    size = max(float(norm.of(point.detach()).max()) for point in points)
    return 4 * torch.finfo(points[0].dtype).eps * size / (1 - constant)


def check_tolerance(tolerance: float) -> None:
    """A number above zero."""
    if not isinstance(tolerance, (int, float)) or isinstance(tolerance, bool) or not 0 < tolerance < math.inf:
        raise ArgumentError("tolerance", f"is {tolerance!r}", "give a finite number above zero")


def below_rounding(tolerance: float, least: float, dtype: torch.dtype) -> ArgumentError:
    """The error of a tolerance that numbers of this kind do not reach."""
    found = f"is {tolerance:g}, below what rounding in {str(dtype).removeprefix('torch.')} leaves here"
    finer = "" if dtype == torch.float64 else ", or compute in float64"
    return ArgumentError("tolerance", found, f"give {least:.1e} or more{finer}")
