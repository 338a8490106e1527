"""integrate: a small ordinary differential equation to nearly all digits, for what has few numbers."""

from __future__ import annotations

from torch import Tensor

from regard.dynamics.blow_up import BlowUpError
from regard.dynamics.schemes import DormandPrince, Velocity

SCHEME = DormandPrince(1e-12)


def integrate(velocity: Velocity, state: Tensor, until: float, scheme: DormandPrince = SCHEME) -> Tensor:
    """The state at time `until` of x' = velocity(t, x); BlowUpError where steps become too short."""
    time, step = 0.0, scheme.first_step(velocity, 0.0, state, until)
    while time < until:
        last = time + step >= until
        tried = until - time if last else step
        moved, accepted, step = scheme.attempt(velocity, time, state, tried)
        if accepted:
            state, time = moved, until if last else time + tried
        if time < until and step < 1e-8 * until:  # nothing that ends takes a hundred million steps
            raise BlowUpError(time, time + tried)
    return state
