"""Schemes: how a flow takes a step, as values with a declared order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from regard import _check
from regard._object import Object

Velocity: TypeAlias = Callable[[float, Tensor], Tensor]
"""(t, x) -> x'."""


class Tableau(NamedTuple):
    """An explicit Runge–Kutta method: stage i stands at x + h Σ_j stages[i][j] k_j, time t + h nodes[i]."""

    nodes: tuple[float, ...]
    stages: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    error: tuple[float, ...] = ()

    def slopes(self, velocity: Velocity, t: float, x: Tensor, step: float) -> list[Tensor]:
        """The velocities k_i at the stages."""
        found: list[Tensor] = []
        for node, row in zip(self.nodes, self.stages, strict=True):
            found.append(velocity(t + step * node, _along(x, step, row, found)))
        return found


class Scheme(Object):
    """A way to take one step of x' = velocity(t, x). Abstract.

    Examples:
        >>> from regard.dynamics import DormandPrince, Euler, Heun, RungeKutta, Scheme
        >>> growth, one = regard.maps.Affine(torch.eye(1).double()), torch.ones(1, 1).double()
        >>> for scheme in (Euler(0.1), Heun(0.1), RungeKutta(0.1), DormandPrince(1e-6)):
        ...     error = float(regard.flow(growth, one, scheme, 1.0).at(1.0)) - 2.718281828459045
        ...     print(isinstance(scheme, Scheme), type(scheme).__name__, f"{abs(error):.0e}")
        True Euler 1e-01
        True Heun 4e-03
        True RungeKutta 2e-06
        True DormandPrince 6e-07
    """

    order: ClassVar[int]
    """The error at a fixed time is of this order in the step."""
    tableau: ClassVar[Tableau]

    def advance(self, velocity: Velocity, t: float, x: Tensor, step: float) -> Tensor:
        """The state one step later."""
        return _along(x, step, self.tableau.weights, self.tableau.slopes(velocity, t, x, step))

    @abstractmethod
    def first_step(self, velocity: Velocity, t: float, x: Tensor, left: float) -> float:
        """The step to begin with, where `left` is the time that is left."""


@dataclass(frozen=True, eq=False, repr=False)
class Euler(Scheme):
    """x + h f(x), order 1. With noise it is the method of Euler and Maruyama.

    Examples:
        >>> growth, one = regard.maps.Affine(torch.eye(1)), torch.ones(1, 1)
        >>> float(regard.flow(growth, one, regard.dynamics.Euler(0.5), 1.0).at(1.0))  # 1.5², for e
        2.25
    """

    step: float
    order: ClassVar[int] = 1
    tableau: ClassVar[Tableau] = Tableau((0.0,), ((),), (1.0,))

    def __post_init__(self) -> None:
        _check.positive("step", self.step)

    def first_step(self, velocity: Velocity, t: float, x: Tensor, left: float) -> float:
        return self.step


@dataclass(frozen=True, eq=False, repr=False)
class Heun(Scheme):
    """x + h/2 (f(x) + f(x + h f(x))), order 2.

    Examples:
        >>> growth, one = regard.maps.Affine(torch.eye(1)), torch.ones(1, 1)
        >>> float(regard.flow(growth, one, regard.dynamics.Heun(1.0), 1.0).at(1.0))  # 1 + 1 + 1/2
        2.5
    """

    step: float
    order: ClassVar[int] = 2
    tableau: ClassVar[Tableau] = Tableau((0.0, 1.0), ((), (1.0,)), (0.5, 0.5))

    def __post_init__(self) -> None:
        _check.positive("step", self.step)

    def first_step(self, velocity: Velocity, t: float, x: Tensor, left: float) -> float:
        return self.step


@dataclass(frozen=True, eq=False, repr=False)
class RungeKutta(Scheme):
    """The classical method of four stages, order 4; attention is computed anew at each of them.

    Examples:
        >>> growth, one = regard.maps.Affine(torch.eye(1)), torch.ones(1, 1)
        >>> path = regard.flow(growth, one, regard.dynamics.RungeKutta(1.0), 1.0)
        >>> round(float(path.at(1.0)), 4)  # 1 + 1 + 1/2 + 1/6 + 1/24
        2.7083
    """

    step: float
    order: ClassVar[int] = 4
    tableau: ClassVar[Tableau] = Tableau(
        (0.0, 0.5, 0.5, 1.0), ((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0)), (1 / 6, 1 / 3, 1 / 3, 1 / 6)
    )

    def __post_init__(self) -> None:
        _check.positive("step", self.step)

    def first_step(self, velocity: Velocity, t: float, x: Tensor, left: float) -> float:
        return self.step


@dataclass(frozen=True, eq=False, repr=False)
class DormandPrince(Scheme):
    """Order 5 with an embedded error estimate of order 4, which chooses the steps (dormand1980).

    A step is taken where the estimate is at most tolerance · (1 + |x|), entry by entry; that is a rule for
    steps and no bound of the error at the end.

    Examples:
        >>> growth, one = regard.maps.Affine(torch.eye(1).double()), torch.ones(1, 1).double()
        >>> path = regard.flow(growth, one, regard.dynamics.DormandPrince(1e-9), 1.0)
        >>> round(float(path.at(1.0)), 6)
        2.718282
    """

    tolerance: float
    order: ClassVar[int] = 5
    tableau: ClassVar[Tableau] = Tableau(
        (0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0),
        (
            (),
            (1 / 5,),
            (3 / 40, 9 / 40),
            (44 / 45, -56 / 15, 32 / 9),
            (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
            (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
            (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
        ),
        (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84, 0.0),
        (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40),
    )

    def __post_init__(self) -> None:
        _check.positive("tolerance", self.tolerance)

    def first_step(self, velocity: Velocity, t: float, x: Tensor, left: float) -> float:
        speed = float(velocity(t, x).detach().abs().max())
        size = 1 + float(x.detach().abs().max())
        return min(left, size * self.tolerance ** (1 / 5) / speed if speed > 0 else left)

    def attempt(self, velocity: Velocity, t: float, x: Tensor, step: float) -> tuple[Tensor, bool, float]:
        """The state one step later, whether the error estimate accepts it, and the step it recommends."""
        slopes = self.tableau.slopes(velocity, t, x, step)
        moved = _along(x, step, self.tableau.weights, slopes)
        with torch.no_grad():
            error = _along(torch.zeros_like(x), step, self.tableau.error, slopes)
            allowed = self.tolerance * (1 + torch.maximum(x.abs(), moved.abs()))
            ratio = float((error.abs() / allowed).max())
        if not ratio < float("inf"):
            return moved, False, step / 5
        factor = min(5.0, max(0.2, 0.9 * ratio**-0.2)) if ratio > 0 else 5.0
        return moved, ratio <= 1, step * factor


def _along(x: Tensor, step: float, weights: tuple[float, ...], slopes: list[Tensor]) -> Tensor:
    for weight, slope in zip(weights, slopes, strict=False):
        if weight != 0:
            x = x + (step * weight) * slope
    return x
