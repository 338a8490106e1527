"""Where attention was noticed: the module whose tokens it is about, and which call of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.audits.calling import called, moving_tensors
from regard.audits.watching.seen import Sight
from regard.audits.watching.watch import Noticed, Pass

LEVELS = 4
"""How far above a product the module is looked for that was given the tokens."""


@dataclass(frozen=True)
class Spot:
    """The module at a path, the call of it that is meant, and the attention that is meant where one call
    computes several.
    """

    path: str
    turn: int = 0
    part: int = 0

    @property
    def name(self) -> str:
        """As a reader finds it."""
        own = called(self.path, self.turn)
        return own if self.part == 0 else f"{own} (part {self.part + 1})"

    @property
    def call(self) -> str:
        """The name of the call, whatever it computes."""
        return called(self.path, self.turn)


def spots(noticed: list[Noticed]) -> dict[Spot, Sight]:
    """What was noticed, by its place, in order."""
    found: dict[Spot, Sight] = {}
    for one in noticed:
        if not one.passes:
            continue
        own = _owner(one)
        part = sum((spot.path, spot.turn) == (own.path, own.turn) for spot in found)
        found[Spot(own.path, own.turn, part)] = one.sight
    return found


def _owner(noticed: Noticed) -> Pass:
    """The innermost module that was given a token for each query; the innermost of all where none was."""
    output = noticed.sight.output
    inner = noticed.passes[::-1][:LEVELS]
    if output is None:
        return inner[0]
    rows = output.shape[0] * output.shape[2]
    return next((own for own in inner if _tokens(own.call) == rows), inner[0])


def _tokens(call: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    """How many tokens a module was given."""
    first: Tensor | None = next(moving_tensors(call), None)
    return -1 if first is None or first.ndim < 2 else first.numel() // max(1, first.shape[-1])
