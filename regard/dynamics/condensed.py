"""Condensed: attention of particles to few atoms of themselves, as a field."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from regard import _check
from regard._upper import exact, exact_lower
from regard.attention import Attention
from regard.certificate import Certificate
from regard.compression.compressing import compress
from regard.compute import Engine
from regard.compute.application import apply
from regard.dynamics.drifts import drift
from regard.errors import ArgumentError
from regard.maps import Map
from regard.measure import Measure
from regard.parameters import part, shared
from regard.proofs.subject import single_heads


@dataclass(frozen=True, eq=False, repr=False)
class Condensed(Map):
    """x ↦ attention of x to few atoms of x, each tangent to a group of particles: what `flow` follows in the
    time of n · k pairs where all particles would take n².

    tolerance: how far a velocity may be from that of all particles; `compress` proves it at every step, for
    every query of a ball that holds the particles.

    Examples:
        >>> from regard.dynamics import Condensed, RungeKutta
        >>> crowd = torch.rand(400, 2, dtype=torch.float64)
        >>> field = Condensed(regard.Attention(regard.Dot(scale=1.0)), tolerance=0.01)
        >>> path = regard.flow(field, crowd, RungeKutta(0.25), until=0.5)
        >>> path.at(0.5).shape
        torch.Size([400, 2])
    """

    attention: Attention = part()
    tolerance: float = shared()

    def __post_init__(self) -> None:
        if not isinstance(self.attention, Attention):
            raise ArgumentError("attention", f"is a {type(self.attention).__name__}", "give an Attention")
        if len(single_heads(self.attention)) > 1:
            found = f"has {len(single_heads(self.attention))} heads"
            raise ArgumentError("attention", found, "give one head: its values are velocities")
        _check.number("tolerance", self.tolerance)
        if not 0 < float(self.tolerance) < math.inf:
            raise ArgumentError("tolerance", f"is {self.tolerance!r}", "give a positive number")

    def __call__(self, x: Tensor) -> Tensor:
        return self.at(Measure(x), None)

    def at(self, x: Measure, engine: Engine | None) -> Tensor:
        """The velocities of weighted particles."""
        atoms = compress(x, self.attention, tolerance=float(self.tolerance)).measure
        found: Tensor = apply(self.attention, x.points, atoms, engine=engine)
        return found

    def departure(self, constant: Certificate | float, time: float) -> float:
        """At least how far any particle is after this time from where the flow among all particles takes it,
        in Euclidean space and up to the errors of the scheme.

        constant: L, at least how much the attention amplifies a change in TokenMax norm where particles are.
        Two flows whose fields differ by at most ε where the second one is: |x - y|' ≤ L |x - y| + ε, so |x -
        y| ≤ ε (e^{Lt} - 1)/L (Grönwall). Euler's steps of length h keep to it: (1 + hL)^{t/h} ≤ e^{Lt}.
        """
        slope = float(constant)
        for name, value in (("constant", slope), ("time", float(time))):
            if not 0 <= value < math.inf:
                raise ArgumentError(name, f"is {value!r}", "give a finite number that is not negative")
        grown = exact(slope) * exact(time)
        steep = exact(time) if slope == 0 else grown.expm1() / exact_lower(slope)
        return float(exact(float(self.tolerance)) * steep)


@drift.rule(Condensed)
def _condensed(map: Condensed, x: Measure, engine: Engine | None) -> Tensor:
    return map.at(x, engine)
