"""Token k moves by at most ρ_k: how far the scores of a head can move,
and how far values and scores then spread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from regard._upper import Upper, exact, stack
from regard.proofs.near.enclosure import Enclosure
from regard.proofs.near.head import LocalHead, LocalValues
from regard.proofs.near.laws import Laws

STATIONS = 6
"""How many points of a path of laws are looked at; the integrand grows along it,
so each piece is bounded by its far end.
"""
FEW = 4
"""Up to how many rows all stations are looked at together."""


class TokenRadii(Enclosure):
    """Bounds of ζ for |d_k| ≤ ρ_k.

    turn: ρ_i of the row's own token. step: α_k ρ_k ≥ |v_k·d_k|, zero for the own token. drift: at least |d_k
    - E d|.
    by_own: ρ_i |own_k|, the part of ω_k that the own token makes; beside_own: the rest of it.
    """

    def __init__(self, local: LocalHead, moves: Tensor) -> None:
        self.moves = exact(moves)
        self.turn = self.moves[local.queries]
        law, rest = local.law, local.rest
        elsewhere = local.queries.unsqueeze(-1) != torch.arange(
            local.n
        )  # a row's own token is not among the others
        self.step = (local.alpha * self.moves).where(elsewhere)
        self.drift = (rest * self.moves + (law * self.moves).sums_of_others()).where(local.seen)
        self.by_own = self.turn.unsqueeze(-1) * local.own_size
        turned = local.a * self.turn.unsqueeze(-1)  # |A d_i|
        # (N2)  ω_k = ρ_i|own_k| + Σ_{l≠i} |1{k=l} - P_l| α_l ρ_l + a ρ_i |d_k - E d|
        others = (law * self.step).sums_of_others() + rest * self.step
        self.beside_own = (others + turned * self.drift).where(local.seen)
        reach = (self.by_own + self.beside_own).where(local.seen)
        # (N4)  ζ_k - ζ_l = (own_k - own_l)·d_i + v_k·d_k - v_l·d_l + d_iᵀ(A_k d_k - A_l d_l)
        each = self.step + turned * self.moves
        both = local.seen.unsqueeze(-1) & local.seen.unsqueeze(-2) & ~torch.eye(local.n, dtype=torch.bool)
        apart = self.turn[:, None, None] * local.own_apart + each.unsqueeze(-1) + each.unsqueeze(-2)
        climb = apart.where(both).amax(-1)
        # (N5)  sd ζ ≤ ρ_i sd(own) + (Σ_{k≠i} P_k (α_k ρ_k)²)^{1/2} + a ρ_i (E ρ²)^{1/2}
        by_keys = (law * self.step.square()).sum(-1).sqrt()
        cross = local.a * self.turn * (law * self.moves.square()).sum(-1).sqrt()
        deviation = self.turn * local.own_spread + by_keys + cross
        super().__init__(local, Laws(local, reach, climb, climb.amax(-1).halved()), deviation)
        self._value_spreads: dict[LocalValues, tuple[Upper, Tensor]] = {}

    def everywhere(self, bound: Callable[[Laws], Upper]) -> Upper:
        """A bound at all stations of the path P e^{tζ}/Z, (stations, rows): at once where rows are few,
        or one by one to save memory.
        """
        if len(self.half.value) <= FEW:
            return bound(self._stations)
        return stack([bound(laws) for laws in self._each_station])

    @cached_property
    def _stations(self) -> Laws:
        return self.laws.part(torch.arange(1, STATIONS + 1, dtype=torch.float64)[:, None, None] / STATIONS)

    @cached_property
    def _each_station(self) -> list[Laws]:
        return [self.laws.part(station / STATIONS) for station in range(1, STATIONS)] + [self.laws]

    def at(self, station: int) -> Laws:
        """The laws at a station, from 1 to `STATIONS`."""
        return self._each_station[station - 1]

    @cached_property
    def highs(self) -> Upper:
        """At least the weights at all stations, (stations, rows, n)."""
        return self.everywhere(lambda laws: laws.high)

    @cached_property
    def spreads(self) -> Upper:
        """At least sd ζ under the laws of all stations: M, or part by part as in (N5)."""
        return self.everywhere(self._spread).minimum(self.half)

    def _spread(self, laws: Laws) -> Upper:
        own = self.local.own_narrow.spreads(laws.high)
        by_keys, moved = laws.most(self.step.square()).sqrt(), laws.most(self.moves.square()).sqrt()
        return self.turn * own + by_keys + self.local.a * self.turn * moved

    def value_spreads(self, values: LocalValues) -> tuple[Upper, Tensor]:
        """At least sd(z·e) over unit e under the laws of all stations, and where that is |[√high z]|,
        (stations, rows).
        """
        if values not in self._value_spreads:
            boxed = self.everywhere(lambda laws: values.z.spreads(laws.high))
            others = self.everywhere(lambda laws: laws.most(values.size.square()).sqrt()).minimum(values.half)
            self._value_spreads[values] = boxed.minimum(others), boxed.value <= others.value
        return self._value_spreads[values]
