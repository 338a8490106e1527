"""Check: one column of the report, a number for every head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from regard.audit.site import Site

_checks: dict[str, Check] = {}


@dataclass(frozen=True)
class Check:
    """measure: a site to one number a head, (heads,); combine: the numbers of all inputs (inputs, heads) to (heads,).

    high_is_alarming says in which direction to look; kind says what sort of number it is: exact, estimated or proved.
    """

    name: str
    title: str
    meaning: str
    measure: Callable[[Site], Tensor]
    combine: Callable[[Tensor], Tensor]
    high_is_alarming: bool
    kind: str = "exact, in float64"


def register(check: Check) -> Check:
    """Make a check known."""
    if check.name in _checks:
        raise ValueError(f"there is a check named {check.name} already")
    _checks[check.name] = check
    return check


def checks() -> tuple[Check, ...]:
    """All checks, by name."""
    return tuple(_checks[name] for name in sorted(_checks))
