"""How far scores and weights of a head can move when token k moves by at most ρ_k, and how far values then spread. Results are (n,)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from regard.certify.near.exponential import exponential_tail, quotient
from regard.certify.near.heads import LocalHead, LocalValues
from regard.certify.near.matrix_norms import MARGIN, row_norms, sums_of_others

STATIONS = 6
"""How many points of a path are looked at; the integrand grows along it, so each piece is bounded by its far end."""
FEW = 4
"""Up to how many rows all of them are looked at together."""


class ScoreMoves:
    """How far scores and weights of one head can move: `reach` ≥ |ζ_ik|, P between `low` and `high`."""

    def __init__(self, local: LocalHead, moves: Tensor) -> None:
        self.local, self.moves, queries = local, moves, local.queries
        p = local.p
        self.alpha = local.alpha.expand_as(p)
        self.diagonal = queries.unsqueeze(-1) == torch.arange(local.n)  # where a row meets its own token
        self.turn = moves[queries]
        self.mean_move, rest = p @ moves, local.log_rest.exp()
        drift = rest * moves + sums_of_others(p * moves)  # at least |d_k - E d|
        self.drift = torch.where(local.seen, drift, torch.zeros_like(drift))
        self.step = (self.alpha * moves).masked_fill(self.diagonal, 0.0)
        self.others = sums_of_others(p * self.step) + rest * self.step
        self.by_own = self.turn.unsqueeze(-1) * local.own_size
        mixed = local.a * self.turn.unsqueeze(-1) * self.drift
        self.reach = (self.by_own + self.others + mixed) * MARGIN + 4 * local.eta
        self.reach = torch.where(local.seen, self.reach, torch.zeros_like(self.reach))
        self.top = self.reach.amax(-1)
        second = (p * self.step.square()).sum(-1).sqrt()
        cross = local.a * self.turn * (p @ moves.square()).sqrt()
        self.variance = ((self.turn * local.own_spread + second + cross + 4 * local.eta) * MARGIN).square()
        self._range()
        self._weights()

    def _range(self) -> None:
        """`climb` ≥ max_l ζ_k - ζ_l for each key, and `half` ≥ half of the largest difference in a row."""
        local = self.local
        each = self.step + local.a * self.turn.unsqueeze(-1) * self.moves
        ranged = self.turn[:, None, None] * local.own_apart + each.unsqueeze(-1) + each.unsqueeze(-2)
        ranged = ranged.masked_fill(~(local.seen.unsqueeze(-1) & local.seen.unsqueeze(-2)), 0.0)
        ranged.diagonal(dim1=-2, dim2=-1).zero_()
        self.climb = ranged.amax(-1) * MARGIN + 8 * local.eta
        self.half = self.climb.amax(-1) / 2

    def _weights(self) -> None:
        local, p = self.local, self.local.p
        rest = local.log_rest.exp().clamp_min(1e-300)
        odds = local.odds
        lifted = torch.sigmoid(odds + torch.minimum(self.reach / rest, self.climb))
        grown = (local.log_p + self.reach).exp().clamp(max=1e200)
        high = torch.minimum(grown, lifted)
        self.high = torch.where(local.seen, (high * MARGIN).clamp(max=1.0), torch.zeros_like(p))
        shrunk = (local.log_p - self.reach).exp()
        fall = shrunk / (shrunk + sums_of_others(grown)).clamp_min(1e-300)
        fall = torch.maximum(torch.nan_to_num(fall, nan=0.0), torch.sigmoid(odds - self.climb))
        left = 1 - sums_of_others(self.high) * MARGIN
        self.low = torch.maximum(fall, left).clamp_min(0.0) / MARGIN
        self.low = torch.minimum(self.low, p)
        self.high = torch.maximum(self.high, p)

    def at(self, time: float) -> ScoreMoves:
        """The same for the laws P e^{tζ}/Z, with the change of scores cut to a part of it."""
        if time == 1:
            return self
        kept = self.__dict__.setdefault("_parts", {})
        if time not in kept:
            kept[time] = ScoreMoves.boxed(self.local, time * self.reach, time * self.climb, time * self.half)
        return kept[time]

    @staticmethod
    def boxed(local: LocalHead, reach: Tensor, climb: Tensor, half: Tensor) -> ScoreMoves:
        """Bounds of weights alone, from bounds of scores that are at hand."""
        made = object.__new__(ScoreMoves)
        made.local, made.reach, made.climb, made.half = local, reach, climb, half
        made._weights()
        return made

    @cached_property
    def stations(self) -> ScoreMoves:
        """`at` for all stations of a path, which come first: (stations, n, n)."""
        times = torch.arange(1, STATIONS + 1, dtype=torch.float64)[:, None, None] / STATIONS
        return ScoreMoves.boxed(self.local, times * self.reach, times * self.climb, times[..., 0] * self.half)

    def everywhere(self, bound: Callable[[ScoreMoves], Tensor]) -> Tensor:
        """A bound at all stations, (stations, n): together where rows are few, which saves calls, or one by one, which saves memory."""
        if len(self.half) <= FEW:
            return bound(self.stations)
        return torch.stack([bound(self.at(station / STATIONS)) for station in range(1, STATIONS + 1)])

    @cached_property
    def highs(self) -> Tensor:
        """The weights' upper bounds at all stations."""
        return self.everywhere(lambda tilted: tilted.high)

    @cached_property
    def spreads(self) -> Tensor:
        """At least the standard deviation of ζ under the laws P e^{sζ}/Z, s ≤ t, at all stations t: half its range, or its parts."""
        return torch.minimum(self.half, self.everywhere(self._spread))

    def _spread(self, tilted: ScoreMoves) -> Tensor:
        local, moves = self.local, self.moves
        narrow, left = local.own_narrow
        own = row_norms(tilted.high, narrow) + left + local.a * local.shift + 4 * local.tilt
        parts = self.turn * own + tilted.most(self.step.square()).sqrt() + local.a * self.turn * tilted.most(moves.square()).sqrt()
        return (parts + 4 * local.eta) * MARGIN

    @cached_property
    def excess(self) -> Tensor:
        """At least Z - 1, Z = E e^ζ."""
        p = self.local.p
        return torch.minimum((p * exponential_tail(self.reach, 2)).sum(-1), self.variance * quotient(self.top, 2, 2)) * MARGIN

    @cached_property
    def change(self) -> Tensor:
        """At least |P'_k - P_k|."""
        return torch.maximum(self.high - self.local.p, self.local.p - self.low)

    @cached_property
    def relative(self) -> Tensor:
        """At least |P'/P - 1| in L²(P), for each row."""
        p = self.local.p
        boxed = (self.change.square() / p.clamp_min(1e-300)).masked_fill(~self.local.seen, 0.0).sum(-1).sqrt()
        steep = torch.expm1(self.top) / self.top.clamp_min(1e-150)
        steep = torch.where(self.top > 1e-100, steep, torch.ones_like(steep))
        ranged = torch.sinh(self.half)  # E e^{2ζ}/(E e^ζ)² ≤ cosh² of half the range, by Kantorovich's inequality
        return torch.minimum(torch.minimum(boxed, steep * self.variance.sqrt()), ranged) * MARGIN

    @cached_property
    def swap(self) -> Tensor:
        """At least Σ_k |P'_k - P_k| f for f = 1: twice the total variation, at most 2 tanh(half/2)."""
        return 2 * torch.tanh(self.half / 2) * MARGIN

    def shifted(self, values: Tensor) -> Tensor:
        """At least Σ_k |P'_k - P_k| f_k for f ≥ 0 (n,)."""
        wide = values.expand_as(self.high)
        wide = torch.where(self.local.seen, wide, torch.zeros_like(wide))
        by_size = self.swap * wide.amax(-1)
        by_square = self.relative * (self.local.p * wide.square()).sum(-1).sqrt()
        return torch.minimum(torch.minimum(by_size, by_square), self.carried(wide)) * MARGIN

    def most(self, values: Tensor) -> Tensor:
        """max Σ P'_k f_k over laws between `low` and `high`, for f ≥ 0 (n, n) or (n,)."""
        values = values.expand_as(self.high)
        room = self.high - self.low
        order = values.argsort(-1, descending=True)
        sorted_room, sorted_values = room.gather(-1, order), values.gather(-1, order)
        free = (1 - self.low.sum(-1, keepdim=True) / MARGIN).clamp_min(0.0)
        before = sorted_room.cumsum(-1) - sorted_room
        filled = torch.minimum(sorted_room, (free - before).clamp_min(0.0))
        return ((self.low * values).sum(-1) + (filled * sorted_values).sum(-1)) * MARGIN

    def carried(self, values: Tensor) -> Tensor:
        """max Σ |P'_k - P_k| f_k: mass that is taken here and put there."""
        up, down = self.high - self.local.p, self.local.p - self.low
        mass = torch.minimum(up.sum(-1, keepdim=True), down.sum(-1, keepdim=True)) * MARGIN
        return _filled(values, up, mass) + _filled(values, down, mass)


def _filled(values: Tensor, room: Tensor, mass: Tensor) -> Tensor:
    order = values.argsort(-1, descending=True)
    sorted_room = room.gather(-1, order)
    before = sorted_room.cumsum(-1) - sorted_room
    return (torch.minimum(sorted_room, (mass - before).clamp_min(0.0)) * values.gather(-1, order)).sum(-1) * MARGIN


def spread_at(values: LocalValues, scores: ScoreMoves, time: float) -> Tensor:
    """At least the standard deviation of Vᵀx in any direction under every law P e^{tζ}/Z, at a station t."""
    return value_spreads(values, scores)[0][round(time * STATIONS) - 1]


def value_spreads(values: LocalValues, scores: ScoreMoves) -> tuple[Tensor, Tensor]:
    """The same at all stations, and where it is |[√high z]|."""
    kept = scores.__dict__.setdefault("_value_spreads", {})
    if id(values) not in kept:
        boxed = scores.everywhere(lambda tilted: row_norms(tilted.high, values.z) + values.w * values.local.shift)
        others = torch.minimum(scores.everywhere(lambda tilted: tilted.most(values.size.square()).sqrt()), values.half)
        kept[id(values)] = torch.minimum(boxed, others) * MARGIN, boxed <= others
    return kept[id(values)]
