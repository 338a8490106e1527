"""flow and iterate: attention as the motion of particles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regard._kinds import names_wrong_kinds
from regard.compute import Engine
from regard.dynamics.fields import read_maps, read_source
from regard.dynamics.hull import warn_of_long_steps
from regard.dynamics.motion import Flow, Transport
from regard.dynamics.schemes import DormandPrince, Euler, Scheme
from regard.dynamics.spaces import Euclidean, Space
from regard.dynamics.trajectory import Trajectory
from regard.errors import ArgumentError
from regard.maps import Mapping
from regard.measure import Measure


@names_wrong_kinds
def flow(
    map: Mapping | Sequence[Mapping],
    x: Measure | Tensor,
    scheme: Scheme,
    until: float,
    *,
    space: Space = Euclidean(),
    noise: float = 0.0,
    seed: int | None = None,
    engine: Engine | None = None,
) -> Trajectory:
    """The particles x' = map(x) from x at time 0: attention as an interacting system (geshkovski2023).

    Of several maps, map k acts on [k T/K, (k+1) T/K), T = until. With noise, dx = map(x) dt + noise dW, by
    Euler(step); the same seed draws the same path. Nothing is computed before the trajectory is asked.

    Examples:
        >>> from regard.dynamics import Euler
        >>> path = regard.flow(regard.Attention(regard.Dot()), torch.randn(6, 2), Euler(0.1), until=1.0)
        >>> path.at(1.0).shape
        torch.Size([6, 2])
    """
    maps, source = read_maps(map), read_source(x)
    if not isinstance(scheme, Scheme):
        remedy = "give a value like Euler(0.1) or RungeKutta(0.1) of regard.dynamics"
        raise ArgumentError("scheme", f"is {scheme!r}", remedy)
    rounding = torch.finfo(source.points.dtype).eps
    if isinstance(scheme, DormandPrince) and scheme.tolerance < 16 * rounding:
        found = f"has tolerance {scheme.tolerance:g}, and {source.points.dtype} rounds by {rounding:.1e}"
        raise ArgumentError("scheme", found, f"give a tolerance of at least {16 * rounding:.1e}")
    if not isinstance(space, Space):
        raise ArgumentError("space", f"is {space!r}", "give Euclidean(), Sphere() or Rescaled(v)")
    if not _is_number(until) or not until > 0:
        raise ArgumentError("until", f"is {until!r}", "give a positive time")
    if not _is_number(noise) or noise < 0:
        raise ArgumentError("noise", f"is {noise!r}", "give a number that is not negative")
    if noise > 0 and not isinstance(scheme, Euler):
        found = f"is {noise:g} with {type(scheme).__name__}"
        raise ArgumentError("noise", found, "with noise take Euler(step): the method of Euler and Maruyama")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ArgumentError("seed", f"is {seed!r}", "give an integer, or None")
    _check_engine(engine)
    if noise > 0 and engine is not None and engine.over_processes:
        found = f"is {noise:g}, and the ranks of a ring would draw the same numbers"
        raise ArgumentError("noise", found, "leave it out, or let one process hold all particles")
    space.enter(source.points)
    warn_of_long_steps(maps, space, scheme)
    drawn = int(torch.randint(1 << 62, ())) if seed is None and noise > 0 else seed or 0
    return Trajectory(Flow(maps, source, float(until), engine, scheme, space, float(noise), drawn))


@names_wrong_kinds
def iterate(
    map: Mapping | Sequence[Mapping], x: Measure | Tensor, steps: int, *, engine: Engine | None = None
) -> Trajectory:
    """The discrete transport μ ↦ μA_μ, `steps` times (vuckovic2020): the layers of a network, one after the
    other; of several maps the first follows the last.

    Examples:
        >>> path = regard.iterate(regard.Attention(regard.Dot()), torch.randn(6, 2), steps=3)
        >>> path.at(3).shape
        torch.Size([6, 2])
    """
    maps, source = read_maps(map), read_source(x)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError("steps", f"is {steps!r}", "give a whole number of at least one")
    _check_engine(engine)
    return Trajectory(Transport(maps, source, float(steps), engine))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_engine(engine: object) -> None:
    if engine is not None and not isinstance(engine, Engine):
        raise ArgumentError("engine", f"is {engine!r}", "give an engine value, e.g. regard.engines.Sdpa()")
