"""The laws that rows can have when their scores change: P' = P e^ζ/Z with bounds of ζ.

ω_k ≥ |ζ_k| for the centered change of a score (E ζ = 0), κ_k ≥ max_l (ζ_k - ζ_l), and 2M ≥ max_kl (ζ_k -
ζ_l).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from regard._upper import Lower, Upper, exact
from regard.proofs.near.head import LocalHead


class Laws:
    """All laws P' of the rows of a head, from ω (`reach`), κ (`climb`) and M (`half`);
    a path of such laws may come first: (…, rows, n).
    """

    def __init__(self, local: LocalHead, reach: Upper, climb: Upper, half: Upper) -> None:
        self.local, self.reach, self.climb, self.half = local, reach, climb, half

    def part(self, time: Tensor | float) -> Laws:
        """The laws P e^{tζ}/Z for a part t of the change, or for several parts (stations, 1, 1)."""
        times = exact(time)
        flat = exact(times.value.squeeze(-1)) if times.value.ndim > 1 else times
        return Laws(self.local, times * self.reach, times * self.climb, flat * self.half)

    @cached_property
    def high(self) -> Upper:
        """At least P'_k (N6): P_k e^{ω_k}; odds grow at most by e^{κ_k},
        and by e^{ω_k/(1 - P_k)} (Jensen on the other keys).
        """
        local = self.local
        climb = (self.reach / local.log_rest.exp_low()).minimum(self.climb)
        return self._grown.minimum(local.odds.logistic(climb)).where(local.seen).firm()

    @cached_property
    def _grown(self) -> Upper:
        return self.local.log_law.exp(self.reach)

    @cached_property
    def low(self) -> Lower:
        """At most P'_k (N7): P_k e^{-ω_k} over the sum of what all can be; odds fall by at most e^{-κ_k};
        what others leave.
        """
        local = self.local
        shrunk = local.log_law.exp_low(self.reach)
        among = shrunk / (Upper(shrunk.bound) + self._grown.sums_of_others())
        left = 1 - self.high.sums_of_others()
        return Lower(among.maximum(local.odds.logistic_low(self.climb), left).where(local.seen).bound)

    @cached_property
    def change(self) -> Upper:
        """At least |P'_k - P_k|."""
        return self._put.maximum(self._taken)

    @cached_property
    def _put(self) -> Upper:
        return (self.high - self.local.law_low).where(self.local.seen)

    @cached_property
    def _taken(self) -> Upper:
        return (self.local.law - self.low).where(self.local.seen)

    @cached_property
    def _free(self) -> Upper:
        """At least 1 - Σ low, what is left to place."""
        return 1 - self.low.sum(-1)

    def most(self, values: Upper) -> Upper:
        """At least max Σ P'_k f_k over laws between `low` and `high`, f ≥ 0 (…, n):
        the rest goes to the largest f first (N8).
        """
        values = values.expand_as(self.high.value)
        certain = (Upper(self.low.bound) * values).sum(-1)
        return certain + fill(values, self.high - self.low, self._free)

    def total_change(self, values: Upper) -> Upper:
        """At least max Σ |P'_k - P_k| f_k: as much mass is taken from keys as is put on others (N9)."""
        values = values.expand_as(self.high.value)
        mass = self._put.sum(-1).minimum(self._taken.sum(-1))
        return fill(values, self._put, mass) + fill(values, self._taken, mass)


def fill(values: Upper, room: Upper, mass: Upper) -> Upper:
    """At least max Σ t_k f_k over 0 ≤ t_k ≤ room_k with Σ t_k ≤ mass:
    rooms are filled from the largest f on.
    """
    worth, wide = values.bound, room.bound
    order = worth.argsort(-1, descending=True)
    rooms = wide.gather(-1, order)
    before = torch.nn.functional.pad(rooms.cumsum(-1)[..., :-1], (1, 0))
    left = mass.unsqueeze(-1) - Lower(before, rooms.shape[-1])
    return (Upper(rooms).minimum(left) * Upper(worth.gather(-1, order))).sum(-1)
